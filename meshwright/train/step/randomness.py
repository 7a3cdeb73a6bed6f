"""Seeds the random generators that a model may draw from."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from meshwright.data.order import derive_seed

_SEEDED_STEPS = 20
_STEPS_BETWEEN_CHECKS = 64
_SEEDS_AT_A_TIME = 64


def step_seed(seed: int, step: int, data_rank: int) -> int:
    """Returns the seed of a step. It depends only on the arguments."""
    return _step_seeds(seed, step // _SEEDS_AT_A_TIME, data_rank)[step % _SEEDS_AT_A_TIME]


@lru_cache(maxsize=16)
def _step_seeds(seed: int, group: int, data_rank: int) -> list[int]:
    """The seeds of successive steps: deriving many at a time takes less time for each."""
    first = group * _SEEDS_AT_A_TIME
    return [derive_seed(seed, "step", step, data_rank) for step in range(first, first + _SEEDS_AT_A_TIME)]


class StepGenerators:
    """The generators of torch, `random` and NumPy, as the steps of a session use them.

    Seeding `random` and NumPy takes longer than launching several operators, and few models draw from them. If none of
    the first steps has drawn from one of these two, they are no longer seeded. One step in a few is then checked: if it
    has drawn from them after all, they are seeded in all later steps. The few steps before draw numbers that do not
    depend on the seed. With `always_seeds`, they are seeded in every step: several ranks have to draw the same numbers.
    """

    def __init__(self, device: torch.device, always_seeds: bool = False) -> None:
        self.always_seeds = always_seeds
        self._cuda: torch.Generator | None = None
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._cuda = torch.cuda.default_generators[index]
        self._steps = 0
        self._has_drawn = False  # from `random` or NumPy

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Within this context, the generators begin at `seed`. Afterwards they are as they were before, so that the
        random numbers of a training loop do not depend on what its sessions draw."""
        states = self.seed(seed)
        try:
            yield
        finally:
            self.restore(states)

    def seed(self, seed: int) -> "GeneratorStates":
        """Seeds the generators. Returns what `restore` needs to make them as they were before."""
        seeds_host = self._steps < _SEEDED_STEPS or self._has_drawn or self.always_seeds
        checks_host = seeds_host or self._steps % _STEPS_BETWEEN_CHECKS == 0
        self._steps += 1
        host, cpu = _host_states() if checks_host else None, torch.default_generator.get_state()
        cuda = (self._cuda.initial_seed(), self._cuda.get_offset()) if self._cuda is not None else None
        if seeds_host:
            random.seed(seed)
            np.random.seed(seed % 2**32)
        host_begin = _host_states() if seeds_host else host
        # Not `torch.manual_seed`: it stores every call with its stack as long as CUDA is not initialized.
        torch.default_generator.manual_seed(seed)
        if self._cuda is not None:
            self._cuda.manual_seed(seed)
        return GeneratorStates(cpu, cuda, host, host_begin, seeds_host)

    def restore(self, states: "GeneratorStates") -> None:
        """Makes the generators as they were before `seed` was called."""
        if states.host_begin is not None:
            self._has_drawn = self._has_drawn or not _same_states(states.host_begin, _host_states())
        if states.seeds_host and states.host is not None:
            random.setstate(states.host[0])
            np.random.set_state(states.host[1])
        torch.default_generator.set_state(states.cpu)
        if self._cuda is not None and states.cuda is not None:
            self._cuda.manual_seed(states.cuda[0])
            self._cuda.set_offset(states.cuda[1])


HostStates = tuple[Any, dict[str, Any]]  # of `random` and of NumPy


class GeneratorStates(NamedTuple):
    """The states of the generators before a step: torch's, that of `random` and NumPy, and what these two began the
    step with. The latter two are None if they are not checked."""

    cpu: torch.Tensor
    cuda: tuple[int, int] | None  # seed and offset
    host: HostStates | None
    host_begin: HostStates | None
    seeds_host: bool


def _host_states() -> HostStates:
    """The states of `random` and of NumPy."""
    return random.getstate(), np.random.get_state(legacy=False)


def _same_states(one: HostStates, other: HostStates) -> bool:
    ours, theirs = one[1]["state"], other[1]["state"]
    return one[0] == other[0] and ours["pos"] == theirs["pos"] and bool(ours["key"][0] == theirs["key"][0])
