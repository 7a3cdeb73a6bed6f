"""Seeds the random generators that a model may draw from."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_SEEDED_STEPS = 20
_STEPS_BETWEEN_CHECKS = 16


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
        seeds_host = self._steps < _SEEDED_STEPS or self._has_drawn or self.always_seeds
        checks_host = seeds_host or self._steps % _STEPS_BETWEEN_CHECKS == 0
        self._steps += 1
        host_before, torch_before = _host_states() if checks_host else None, torch.default_generator.get_state()
        cuda_before = (self._cuda.initial_seed(), self._cuda.get_offset()) if self._cuda is not None else None
        if seeds_host:
            random.seed(seed)
            np.random.seed(seed % 2**32)
        host_begin = _host_states() if seeds_host else host_before
        # Not `torch.manual_seed`: it stores every call with its stack as long as CUDA is not initialized.
        torch.default_generator.manual_seed(seed)
        if self._cuda is not None:
            self._cuda.manual_seed(seed)
        try:
            yield
        finally:
            if host_begin is not None:
                self._has_drawn = self._has_drawn or not _same_states(host_begin, _host_states())
            if seeds_host and host_before is not None:
                random.setstate(host_before[0])
                np.random.set_state(host_before[1])
            torch.default_generator.set_state(torch_before)
            if self._cuda is not None and cuda_before is not None:
                self._cuda.manual_seed(cuda_before[0])
                self._cuda.set_offset(cuda_before[1])


def _host_states() -> tuple[Any, dict[str, Any]]:
    """The states of `random` and of NumPy."""
    return random.getstate(), np.random.get_state(legacy=False)


def _same_states(one: tuple[Any, dict[str, Any]], other: tuple[Any, dict[str, Any]]) -> bool:
    ours, theirs = one[1]["state"], other[1]["state"]
    return one[0] == other[0] and ours["pos"] == theirs["pos"] and bool(ours["key"][0] == theirs["key"][0])
