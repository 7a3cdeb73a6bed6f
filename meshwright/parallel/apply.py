"""A plan put on a model, step by step. It decides nothing that the plan does not say."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from meshwright.batch import at_least_fp32
from meshwright.errors import InputError
from meshwright.parallel.mesh import build_mesh
from meshwright.parallel.precision import forward_precision
from meshwright.parallel.replicate import align_buffers, replicate
from meshwright.plan import Plan
from meshwright.profile.recompute import recompute_blocks


@dataclass(frozen=True)
class ParallelModel:
    """`module` is the user's model, which holds the weights; `runner` is what a training step calls."""

    plan: Plan
    module: nn.Module
    runner: nn.Module
    mesh: DeviceMesh | None
    device: torch.device

    def forward(self, arguments: tuple[Any, ...], keywords: dict[str, Any], *, training: bool) -> Any:
        # Evaluation calls the bare module: ranks may have different numbers of batches, so nobody waits.
        model = self.runner if training else self.module
        with forward_precision(self.plan, self.device.type):
            output = model(*arguments, **keywords)
        return at_least_fp32(output)

    def combining(self, last: bool) -> AbstractContextManager[Any]:
        """Gradients travel in the backward pass of a step's last microbatch only."""
        if isinstance(self.runner, DistributedDataParallel) and not last:
            return self.runner.no_sync()
        return nullcontext()

    def align_buffers(self) -> None:
        if self.mesh is not None:
            align_buffers(self.module, self.mesh)


def apply(plan: Plan, module: nn.Module, device: torch.device, world_size: int) -> ParallelModel:
    check_runnable(plan)
    mesh = build_mesh(plan, device.type, world_size)
    module = module.to(device)
    if plan.compute.layout == "channels_last":
        # Before wrapping: DDP's buckets take the strides that the parameters have then.
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    # Before wrapping: DDP looks for the parameters that a whole forward pass, with all its blocks, has used.
    recompute_blocks(module, plan.memory.recompute)
    runner = module if mesh is None else replicate(module, mesh, plan.gradients.bucket_bytes)
    return ParallelModel(plan, module, runner, mesh, device)


def check_runnable(plan: Plan) -> None:
    """Says before ranks start which part of a plan this version cannot run."""
    for axis, size in plan.axes.model_dump().items():
        if axis != "replicate" and size > 1:
            raise InputError(f"plan.axes.{axis} is {size}: this version runs the replicate axis only, set {axis} to 1")
    for name, split in plan.modules.splits.items():
        if split.axis == "replicate" and split.kind != "none":
            raise InputError(f"plan.modules.splits.{name}: this version splits no layer over the replicate axis")
    if plan.numerics.precision not in ("fp32", "bf16"):
        raise InputError(f"plan.numerics.precision is {plan.numerics.precision}: this version runs fp32 and bf16")
