"""Momentum under asynchrony: every worker has its own, and is sent weights that are already where momentum takes them.

One momentum for all, fed with gradients that are an update late, is stable only at a rate that is lower by a factor of
(1 + m) / (1 - m) · 2 than without the delay (38 at m = 0.9): the default job diverges within 20 steps. So worker i has
its own v_i, and computes its next gradient at

    x - rate · m · Σ v_j          ahead()

about where the weights will be when it is applied. From: Hakimi, Barkai, Gabel, Schuster, "Taming Momentum in a
Distributed Asynchronous Environment", arXiv:1907.11612 (DANA). Of torch's optimizers this is for SGD; those that scale
their steps by what they have seen (Adam) are bounded by their rate, and stay as they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

KEY = "momentum_buffer"


class OwnMomentum:
    """Holds what each worker has moved by, beside an SGD optimizer whose state is the mean of it."""

    def __init__(self, optimizer: torch.optim.Optimizer, rate: float) -> None:
        """`rate`: the part of the learning rate that an update has."""
        self._optimizer = optimizer
        self._rate = rate
        self._moving: dict[int, dict[nn.Parameter, Tensor]] = {}
        self._start: dict[nn.Parameter, Tensor] | None = None  # a saved run's, with which each worker begins
        self._came: set[int] = set()

    @staticmethod
    def helps(optimizer: torch.optim.Optimizer) -> bool:
        return type(optimizer) is torch.optim.SGD and any(group["momentum"] for group in optimizer.param_groups)

    @contextmanager
    def of(self, worker: int) -> Iterator[None]:
        """Around the optimizer's step on this worker's gradients."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        state = self._optimizer.state
        if self._start is None:
            self._start = {p: state[p][KEY] for p in parameters if state[p].get(KEY) is not None}
        begins = {} if worker in self._came else {p: moving.clone() for p, moving in self._start.items()}
        own = self._moving.get(worker, begins)
        self._came.add(worker)
        for parameter in parameters:
            state[parameter][KEY] = own.get(parameter)
        yield
        self._moving[worker] = {p: state[p][KEY] for p in parameters if state[p].get(KEY) is not None}
        for parameter in parameters:
            moving = [theirs[parameter] for theirs in self._moving.values() if parameter in theirs]
            state[parameter][KEY] = torch.stack(moving).mean(dim=0) if moving else None

    def forget(self, worker: int) -> None:
        self._moving.pop(worker, None)

    def ahead(self) -> dict[nn.Parameter, Tensor]:
        """The weights where momentum alone will have taken them when every worker has been heard once more."""
        found = {}
        for group in self._optimizer.param_groups:
            sign = 1.0 if group["maximize"] else -1.0
            for parameter in group["params"]:
                moving = [theirs[parameter] for theirs in self._moving.values() if parameter in theirs]
                if moving:
                    step = torch.stack(moving).sum(dim=0)
                    factor = sign * float(group["lr"]) * self._rate * group["momentum"]
                    found[parameter] = parameter.detach() + factor * step
        return found
