"""`StepRunner`: the interface through which the trainer runs the steps of a job. `Session` implements it, and so does
`Server` for runs with parameter servers."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.state import State
from meshwright.data.loading import LoadingOptions
from meshwright.plan import Plan
from meshwright.train.metrics import Metric


class StepRunner(Protocol):
    """The members of `Session` that the trainer uses. They mean the same as in `Session`. `module` is None if
    other processes have the model."""

    @property
    def plan(self) -> Plan: ...
    @property
    def module(self) -> nn.Module | None: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    @property
    def schedule(self) -> LRScheduler | None: ...
    @property
    def steps(self) -> int: ...
    @property
    def position(self) -> tuple[int, int]: ...
    @property
    def parts(self) -> int | None: ...
    @property
    def nonfinite(self) -> str | None: ...
    @property
    def spike(self) -> str | None: ...
    @property
    def skipped_steps(self) -> int: ...

    def batches(
        self, dataset: Any, epochs: int | None, global_batch: int, loading: LoadingOptions, drop_last: bool, /
    ) -> Iterator[Any]: ...
    def step(self, batch: Any, /) -> Tensor: ...
    def leave_out(self, batch: Any, /) -> None: ...
    def step_schedule(self, metric: float | None = None) -> None: ...
    def evaluate(
        self,
        dataset: Any,
        metrics: Mapping[str, Metric] | None,
        batch: int,
        loading: LoadingOptions,
        interrupted: Callable[[], bool],
        /,
    ) -> dict[str, float] | None: ...
    def state(self) -> State: ...
    def about(self) -> dict[str, Any]: ...
    def restore(self, path: Path, manifest: Manifest, /) -> None: ...
