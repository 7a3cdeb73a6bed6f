"""SGD with momentum for asynchronous updates: every worker has its own momentum buffer, and receives the weights that
momentum will have reached when its next gradient is applied.

With one momentum buffer for all workers and gradients that are one update late, training is stable only at a learning
rate that is lower by a factor of (1 + m) / (1 - m) · 2 than without the delay (38 at m = 0.9): the default job diverges
within 20 steps. So worker i has its own buffer v_i, and computes its next gradient at

    x - rate · m · Σ v_j          look_ahead()

(x: weights, m: momentum, rate: learning rate of one update), which is about where the weights will be when that
gradient is applied. From: Hakimi, Barkai, Gabel, Schuster, "Taming Momentum in a Distributed Asynchronous Environment",
arXiv:1907.11612 (DANA). Of torch's optimizers only SGD needs this. Optimizers that normalize their steps, such as Adam,
bound them by the learning rate, and are used unchanged.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

KEY = "momentum_buffer"


class PerWorkerMomentum:
    """Keeps the momentum buffers of every worker for one SGD optimizer. The optimizer's own state holds their mean."""

    def __init__(self, optimizer: torch.optim.Optimizer, rate: float) -> None:
        """`rate` is the fraction of the learning rate that one update uses."""
        self._optimizer = optimizer
        self._rate = rate
        self._buffers: dict[int, dict[nn.Parameter, Tensor]] = {}
        # The optimizer's buffers before the first update here, with which each worker starts: those of a resumed
        # run, or none. The attribute is None before that update.
        self._initial: dict[nn.Parameter, Tensor] | None = None
        self._started: set[int] = set()

    @staticmethod
    def applies_to(optimizer: torch.optim.Optimizer) -> bool:
        """Whether this is an SGD optimizer with momentum."""
        return type(optimizer) is torch.optim.SGD and any(group["momentum"] for group in optimizer.param_groups)

    @contextmanager
    def of_worker(self, worker: int) -> Iterator[None]:
        """Gives the optimizer this worker's buffers for the step inside the `with` block. Afterwards its state holds
        the mean over all workers again."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        state = self._optimizer.state
        if self._initial is None:
            self._initial = {p: state[p][KEY] for p in parameters if state[p].get(KEY) is not None}
        initial = {} if worker in self._started else {p: buffer.clone() for p, buffer in self._initial.items()}
        worker_buffers = self._buffers.get(worker, initial)
        self._started.add(worker)
        for parameter in parameters:
            state[parameter][KEY] = worker_buffers.get(parameter)
        yield
        self._buffers[worker] = {p: state[p][KEY] for p in parameters if state[p].get(KEY) is not None}
        for parameter in parameters:
            buffers = self._buffers_of(parameter)
            state[parameter][KEY] = torch.stack(buffers).mean(dim=0) if buffers else None

    def forget(self, worker: int) -> None:
        """Drops the buffers of a worker that is gone."""
        self._buffers.pop(worker, None)

    def look_ahead(self) -> dict[nn.Parameter, Tensor]:
        """Returns the weights that momentum alone will have reached when one more gradient of every worker has been
        applied. Parameters without a momentum buffer are left out."""
        weights = {}
        for group in self._optimizer.param_groups:
            sign = 1.0 if group["maximize"] else -1.0
            for parameter in group["params"]:
                buffers = self._buffers_of(parameter)
                if buffers:
                    step = torch.stack(buffers).sum(dim=0)
                    factor = sign * float(group["lr"]) * self._rate * group["momentum"]
                    weights[parameter] = parameter.detach() + factor * step
        return weights

    def _buffers_of(self, parameter: nn.Parameter) -> list[Tensor]:
        """The buffers of all workers that have one for the parameter."""
        return [buffers[parameter] for buffers in self._buffers.values() if parameter in buffers]
