"""`RecomputedRandomness`: lets a CUDA graph draw the same random numbers again where a block is recomputed.

`torch.utils.checkpoint` reads the state of the generator before a block, and sets it before the block is recomputed.
While a graph is captured, torch can neither read nor set it, because a replay begins at a state that is not known yet.
With b the offset of the generator at the beginning of a step, and o_n the numbers drawn before the n-th read:

    run before the capture     read n returns the state; o_n = offset - b is noted                        recorded()
    capture                    read n returns n; setting n makes a spare generator current                captured()
    replay                     the spare generator of n begins at b + o_n                                 begin_replay()

So every block draws what it draws in a run without a graph.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class _Read:
    """Stands for a state that was read during a capture."""

    offset: int


class RecomputedRandomness:
    """The random numbers of the steps with one key of a `StepGraphs`."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._offsets: list[int] = []  # o_n of the last recorded run
        self._settings = 0  # how often it set a state
        self.spares: list[torch.Generator] = []
        self._beginnings: list[tuple[torch.Generator, int]] = []  # of the spare generators that the graph uses

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """The context of a run before the capture."""
        beginning = self._generator.get_offset()
        self._offsets, self._settings = [], 0
        read, write = torch.cuda.get_rng_state, torch.cuda.set_rng_state

        def get(*args: Any, **kwargs: Any) -> Any:
            self._offsets.append(self._generator.get_offset() - beginning)
            return read(*args, **kwargs)

        def set_(*args: Any, **kwargs: Any) -> None:
            self._settings += 1
            write(*args, **kwargs)

        with _replaced(get, set_):
            yield

    def make_spares(self) -> list[torch.Generator]:
        """Makes the generators that the graph will need, which have to be registered with it before its capture."""
        self.spares = [torch.Generator(self._generator.device) for _ in range(self._settings)]
        self._beginnings = []
        return self.spares

    @contextmanager
    def captured(self) -> Iterator[None]:
        """The context of the capture."""
        own_state = self._generator.graphsafe_get_state()
        offsets, spares = iter(self._offsets), iter(self.spares)

        def get(*_: Any, **__: Any) -> Any:
            offset = next(offsets, None)
            if offset is None:
                raise RuntimeError("the step recomputes more blocks than the steps before it did")
            return _Read(offset)

        def set_(state: Any, *_: Any, **__: Any) -> None:
            spare = next(spares, None)
            if spare is None or not isinstance(state, _Read):
                raise RuntimeError("the step sets the state of the random generator")
            self._generator.graphsafe_set_state(spare)
            self._beginnings.append((spare, state.offset))

        try:
            with _replaced(get, set_):
                yield
        finally:
            self._generator.graphsafe_set_state(own_state)

    def begin_replay(self) -> None:
        """Sets the spare generators for the next replay, which begins at the present state of the generator."""
        if not self._beginnings:
            return
        seed, offset = self._generator.initial_seed(), self._generator.get_offset()
        for spare, drawn in self._beginnings:
            spare.manual_seed(seed)
            spare.set_offset(offset + drawn)


@contextmanager
def _replaced(get: Callable[..., Any], set_: Callable[..., None]) -> Iterator[None]:
    """Within this context, torch reads and sets the states of CUDA generators with these functions."""
    originals = torch.cuda.get_rng_state, torch.cuda.set_rng_state
    torch.cuda.get_rng_state, torch.cuda.set_rng_state = get, set_
    try:
        yield
    finally:
        torch.cuda.get_rng_state, torch.cuda.set_rng_state = originals
