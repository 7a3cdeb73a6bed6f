"""Averages the gradients of a model whose experts are divided over ranks, without a shard axis: those of experts over
the ranks that hold copies of them, all others over all data and context ranks."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.collectives.reducers import make_reducer
from meshwright.parallel.mesh import expert_copies_group, token_group
from meshwright.parallel.precision import gradient_reduce_dtype
from meshwright.parallel.replicate.gradient_averaging import GradientAverager, gradient_averager
from meshwright.parallel.weights.layout import ParameterLayout
from meshwright.plan import Plan


class SeveralAveragers(GradientAverager):
    """Averages the gradients of several sets of parameters, each over ranks of its own."""

    def __init__(self, averagers: list[GradientAverager]) -> None:
        self._averagers = averagers

    @contextmanager
    def averaging(self, last: bool) -> Iterator[None]:
        with ExitStack() as stack:
            for averager in self._averagers:
                stack.enter_context(averager.averaging(last))
            yield

    def finish(self) -> None:
        for averager in self._averagers:
            averager.finish()


def averager_of_experts_and_others(
    plan: Plan, module: nn.Module, mesh: DeviceMesh, layouts: Mapping[str, ParameterLayout], device: torch.device
) -> Callable[[], GradientAverager] | None:
    """Returns a function that makes the averager; None if the model has no trainable parameters."""
    trainable = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    experts = {name for name in trainable if name in layouts and layouts[name].axis == "expert"}
    groups = [(set(trainable) - experts, token_group(mesh)), (experts, expert_copies_group(mesh))]
    make = [
        partial(_averager, plan, module, set(trainable) - names, group, device)
        for names, group in groups
        if names and group is not None
    ]
    return (lambda: SeveralAveragers([make_one() for make_one in make])) if make else None


def _averager(
    plan: Plan, module: nn.Module, skip: set[str], group: dist.ProcessGroup, device: torch.device
) -> GradientAverager:
    named = module.named_parameters()
    gradient_bytes = sum(p.numel() * p.element_size() for name, p in named if p.requires_grad and name not in skip)
    reducer, _ = make_reducer(plan.gradients.algorithm, group, device, gradient_bytes)
    return gradient_averager(
        module,
        reducer,
        plan.gradients.bucket_bytes,
        skip,
        overlap=plan.axes.pipeline == 1,
        reduce_dtype=gradient_reduce_dtype(plan),
    )
