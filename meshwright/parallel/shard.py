"""The shard axis: FSDP2 over the ranks that share one copy of the model, one unit a block and one for the rest.

What `plan.memory.sharding` divides, each level with those before it (a step of several microbatches):

    optimizer     weights are gathered once a step, gradients are reduce-scattered behind the last microbatch
    gradients     weights are gathered once a step, gradients are reduce-scattered behind every microbatch
    parameters    weights are gathered for each block's forward pass and again for its backward pass

Beside a replicate axis the gradients of a shard are averaged over it behind the last microbatch.

FSDP2 expects that every rank uses every weight in every step. Here a weight that a rank did not use counts as a
gradient of zero, and one that no rank used has none, as on one process (`finish`). Weights that FSDP2 cannot divide
(a single number, another dtype than the rest of its block) stay whole on every rank and are averaged by us.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from meshwright.blocks.recompute import find_blocks
from meshwright.errors import InputError
from meshwright.parallel.pipeline.check import on_several_stages
from meshwright.parallel.pipeline.remote_modules import LeftOut
from meshwright.parallel.precision import sharding_policy
from meshwright.parallel.replicate.combine import average
from meshwright.parallel.replicate.replicate import align_over
from meshwright.plan import Plan


def shard(module: nn.Module, mesh: DeviceMesh, plan: Plan, *, units: bool = True) -> None:
    """Divides the module's weights, in place. Without `units` the whole module is gathered at once: the only way for
    a model whose ranks run different blocks, since they have to gather and combine in one order."""
    wide = [name for name, split in plan.modules.splits.items() if split.axis == "replicate" and split.kind != "none"]
    if wide:
        raise InputError(
            f"plan.modules.splits.{wide[0]} splits a layer over the replicate axis, and plan.axes.shard is "
            f"{plan.axes.shard}: they do not go together, set shard to 1 or leave the split out"
        )
    divided = next((name for name, p in module.named_parameters() if isinstance(p, DTensor)), None)
    if divided is not None:
        raise on_several_stages(divided.removeprefix("model."), plan)
    data = mesh["replicate", "shard"] if plan.axes.replicate > 1 else mesh["shard"]
    for parameter in module.parameters():
        if not parameter.is_contiguous():  # FSDP2 divides rows
            parameter.data = parameter.data.contiguous()
    reshard = plan.memory.sharding == "parameters"
    precision = sharding_policy(plan)
    for block in _unit_blocks(module) if units else []:
        ignored = _undivided(block.parameters())
        fully_shard(block, mesh=data, reshard_after_forward=reshard, mp_policy=precision, ignored_params=ignored)
    inside = {p for block in module.modules() if isinstance(block, FSDPModule) for p in block.parameters()}
    rest = _undivided(p for p in module.parameters() if p not in inside)
    # The outermost unit ends forward and begins backward: FSDP2 leaves it gathered in between.
    fully_shard(
        module,
        mesh=data,
        reshard_after_forward=None if reshard else False,
        mp_policy=precision,
        ignored_params=rest,
    )
    for group in _groups(module):
        group.post_backward = _PostBackward(group)


@contextmanager
def combining(module: nn.Module, plan: Plan, first: bool, last: bool) -> Iterator[None]:
    """Around the forward and backward pass of one microbatch of a step. Leaves, behind the last one, the mean of the
    data ranks' gradients in the sharded parameters."""
    assert isinstance(module, FSDPModule)
    level = plan.memory.sharding
    if first:
        align_over(module, _data_groups(module))
    module.set_requires_gradient_sync(last or level != "optimizer")
    module.set_requires_all_reduce(last)  # the sums of a shard wait for the last microbatch
    module.set_reshard_after_backward(last or level == "parameters")
    module.set_is_last_backward(last)
    for group in () if first else _groups(module):
        # FSDP2 gathers ahead in the order of all forward passes since the last one: it is to know this one only, or it
        # gathers, behind the first unit, the last one of the microbatch before.
        group.comm_ctx.post_forward_order.clear()
        group._post_forward_indices.clear()
    yield
    if last:
        finish(module)


def finish(module: nn.Module) -> None:
    """Behind a step's last backward pass, on every data rank: averages what FSDP2 does not divide, and takes the
    gradient from weights that no rank has used."""
    groups = _data_groups(module)
    divided = [parameter for group in _groups(module) for parameter in group.fsdp_params]
    divided = [parameter for parameter in divided if parameter.sharded_param.requires_grad]
    used = {parameter for group in _groups(module) for parameter in group.post_backward.used}
    for group in _groups(module):
        group.post_backward.used.clear()
    average([p for p in module.parameters() if p.requires_grad and not isinstance(p, DTensor)], groups)
    if not divided:
        return
    flags = torch.tensor([parameter in used for parameter in divided], dtype=torch.int32)
    missing = not bool(flags.all())
    flags = flags.to(divided[0].sharded_param.device)
    for process_group in groups:
        dist.all_reduce(flags, group=process_group)
    if missing:  # otherwise it is known, and the device need not be waited for
        for parameter, users in zip(divided, flags.tolist(), strict=True):
            if not users:
                parameter.sharded_param.grad = None


def reshard(module: nn.Module) -> None:
    """Frees gathered weights, so that the module's parameters are the divided ones; a forward pass gathers again."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


class _PostBackward:
    """Stands before a unit's own `post_backward`: weights without a gradient are given one of zero, since all ranks
    have to combine the same ones; those that have one are noted."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._once = group.post_backward
        self.used: set[Any] = set()

    def __call__(self, *unused: Any) -> None:
        for parameter in self._group.fsdp_params:
            if not parameter.sharded_param.requires_grad or not hasattr(parameter, "_unsharded_param"):
                continue
            gathered = parameter.unsharded_param
            if gathered.grad is not None or parameter.unsharded_accumulated_grad is not None:
                self.used.add(parameter)
            elif self._group.reduce_grads:
                gathered.grad = torch.zeros(gathered.shape, dtype=gathered.dtype, device=gathered.device)
        self._once(*unused)


def _unit_blocks(module: nn.Module) -> list[nn.Module]:
    """Blocks that own all of their weights: a weight that is tied to one outside has to be gathered with it. One that
    runs here in part is none: its result, by which FSDP2 knows when backward begins, is not what leaves the stage."""
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, set()).add(part)
    blocks = [module.get_submodule(name) for name in find_blocks(module)]
    unique = list(dict.fromkeys(block for block in blocks if block is not module))
    entire = [b for b in unique if not any(isinstance(part, LeftOut) for part in b.modules())]
    return [b for b in entire if all(owners[p] <= set(b.modules()) for p in b.parameters())]


def _undivided(parameters: Iterable[nn.Parameter]) -> set[nn.Parameter]:
    """What FSDP2 refuses in one unit: single numbers, and trainable weights of another dtype than the most have."""
    found = list(parameters)
    sizes: Counter[torch.dtype] = Counter()
    for parameter in found:
        if parameter.requires_grad:
            sizes[parameter.dtype] += parameter.numel()
    dtype = sizes.most_common(1)[0][0] if sizes else None
    return {p for p in found if p.dim() == 0 or (p.requires_grad and p.dtype != dtype)}


def _groups(module: nn.Module) -> Iterator[Any]:
    """FSDP2's own record of each unit's parameters."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            state = unit._get_fsdp_state()
            several = getattr(state, "_fsdp_param_groups", None)  # torch before 2.12 has one or none
            one = getattr(state, "_fsdp_param_group", None)
            yield from several if several is not None else [one] if one is not None else []


def _data_groups(module: nn.Module) -> list[dist.ProcessGroup]:
    """The process groups of all data axes, from what FSDP2 was given."""
    for group in _groups(module):
        mesh: DeviceMesh = group.mesh_info.mesh
        return [mesh.get_group(axis) for axis in range(mesh.ndim)]
    return []
