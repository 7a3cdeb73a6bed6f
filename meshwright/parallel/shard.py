"""The shard axis: FSDP2 over the ranks that share one copy of the model. Each block is an FSDP2 unit, whose weights are
gathered together; the weights outside of blocks form one more unit.

`plan.memory.sharding` says what is sharded; each level includes the levels above it. In a step of several microbatches:

    optimizer     weights are all-gathered once per step, gradients are reduce-scattered after the last microbatch
    gradients     weights are all-gathered once per step, gradients are reduce-scattered after every microbatch
    parameters    weights are all-gathered for each block's forward pass and again for its backward pass

With `plan.shares.shards`, ranks hold numbers of rows in these proportions (weights/proportional_shards.py).

With `plan.memory.offload: parameters`, FSDP2 keeps the shards of weights and gradients in CPU memory: it copies a
unit's shards to the GPU when it gathers them, and the reduced gradients back.

If there is a replicate axis too, the gradients of a shard are averaged over it after the last microbatch.

FSDP2 expects that every rank uses every weight in every step. This file lifts that: if a rank did not use a weight, its
gradient counts as zero on that rank (`_PostBackward`); if no rank used it, its gradient is None, as on one process
(`finish_step`). Weights that FSDP2 cannot shard (a single number, or a weight of another dtype than most of its unit)
stay whole on every rank, and `finish_step` averages their gradients. A model may also differentiate its output in the
forward pass; its weights are then gathered once for both passes (`_PreBackward`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from meshwright.blocks.recompute import find_blocks
from meshwright.collectives.wait_clock import WAIT_CLOCK
from meshwright.model_io.output_trees import register_dataclasses
from meshwright.parallel.expert.divide import divided_layers, divided_parameters, expert_placement
from meshwright.parallel.mesh import has_axis, joined_axes
from meshwright.parallel.pipeline.check import shared_between_stages_error
from meshwright.parallel.pipeline.remote_modules import RemoteModule
from meshwright.parallel.precision import sharding_policy
from meshwright.parallel.replicate.gradient_averaging import average_once
from meshwright.parallel.replicate.replicate import broadcast_buffers_over
from meshwright.parallel.torch_private import (
    count_waits,
    forget_forward_order,
    forward_is_running,
    free_gathered,
    fsdp_parameter_groups,
    gather_until_backward,
    gradient_hooks,
    in_backward_node,
    keep_gathered,
    replace_pre_backward,
    was_gathered,
)
from meshwright.parallel.weights.offload import offloads_parameters
from meshwright.parallel.weights.proportional_shards import proportional_mesh
from meshwright.parallel.weights.torch_private import divide_in_proportion
from meshwright.plan import Plan


def shard(module: nn.Module, mesh: DeviceMesh, plan: Plan, *, per_block: bool = True) -> None:
    """Shards the module's weights in place. Without `per_block` the whole module is one unit. This is needed if ranks
    may run different blocks, because all ranks have to call collectives in the same order."""
    hooks = {name: gradient_hooks(p) for name, p in module.named_parameters() if any(gradient_hooks(p))}
    already_sharded = next((name for name, p in module.named_parameters() if isinstance(p, DTensor)), None)
    if already_sharded is not None:
        raise shared_between_stages_error(already_sharded.removeprefix("model."), plan)
    proportions = plan.shares.uneven_shards
    data_mesh = _sharding_mesh(mesh, ("shard", "expert", "context"))
    if proportions:
        data_mesh = proportional_mesh(mesh, proportions)
    whole_experts = _shard_experts(module, mesh, plan)
    for parameter in module.parameters():
        if not parameter.is_contiguous():  # FSDP2 shards rows
            parameter.data = parameter.data.contiguous()
    reshard_blocks = plan.memory.sharding == "parameters"
    policy = sharding_policy(plan)
    offload = CPUOffloadPolicy() if offloads_parameters(plan, mesh.device_type) else OffloadPolicy()
    for block in _unit_blocks(module) if per_block else []:
        block.register_forward_hook(_register_dataclasses)
        _shard_unit(
            block,
            proportional=bool(proportions),
            mesh=data_mesh,
            reshard_after_forward=reshard_blocks,
            mp_policy=policy,
            offload_policy=offload,
            ignored_params=_unshardable(block.parameters()) | whole_experts,
        )
    in_blocks = whole_experts | {p for b in module.modules() if isinstance(b, FSDPModule) for p in b.parameters()}
    # The root unit is needed at the end of the forward pass and again at the beginning of the backward pass. Therefore
    # FSDP2's default (None) leaves it gathered in between.
    module.register_forward_hook(_register_dataclasses)
    _shard_unit(
        module,
        proportional=bool(proportions),
        mesh=data_mesh,
        reshard_after_forward=None if reshard_blocks else False,
        mp_policy=policy,
        offload_policy=offload,
        ignored_params=_unshardable(p for p in module.parameters() if p not in in_blocks) | whole_experts,
    )
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            replace_pre_backward(unit, partial(_PreBackward, unit))
            unit.register_forward_pre_hook(_follow_requires_grad)
            for group in fsdp_parameter_groups(unit):
                count_waits(group, WAIT_CLOCK.counted)
                group.post_backward = _PostBackward(unit, group)
    if hooks:
        _keep_gradient_hooks(module, hooks)


def _shard_unit(unit: nn.Module, *, proportional: bool, **options: Any) -> None:
    """Makes the module an FSDP2 unit with these options of `fully_shard`. With `proportional`, its ranks hold as many
    rows of each weight as their mesh says."""
    wholes = {
        (owner, name): parameter
        for owner in unit.modules()
        for name, parameter in owner._parameters.items()
        if proportional and parameter is not None and not isinstance(parameter, DTensor)
    }
    fully_shard(unit, **options)
    assert isinstance(unit, FSDPModule)
    if proportional:
        divide_in_proportion([p for group in fsdp_parameter_groups(unit) for p in group.fsdp_params], wholes)


def _sharding_mesh(mesh: DeviceMesh, axes: tuple[str, ...], name: str = "sharding") -> DeviceMesh:
    """The mesh over which FSDP2 shards, with these axes joined, and with the replicate axis if there is one."""
    sharding = joined_axes(mesh, axes, name)
    if not has_axis(mesh, "replicate"):
        return sharding
    assert sharding.mesh_dim_names is not None
    return mesh["replicate", sharding.mesh_dim_names[0]]


def _shard_experts(module: nn.Module, mesh: DeviceMesh, plan: Plan) -> set[nn.Parameter]:
    """Shards experts that are divided over the expert axis over the rest of the shard axis and context ranks; returns
    the weights that stay whole, for want of such ranks. `finish_step` averages their gradients over replicas."""
    if plan.axes.expert == 1:
        return set()
    if not has_axis(mesh, "shard") and not has_axis(mesh, "context"):
        return set(divided_parameters(module))
    sharding = _sharding_mesh(mesh, ("shard", "context"), "expert_sharding")
    for layer in divided_layers(module):
        fully_shard(
            layer,
            mesh=sharding,
            reshard_after_forward=plan.memory.sharding == "parameters",
            mp_policy=sharding_policy(plan),
            shard_placement_fn=partial(expert_placement, ranks=sharding.size(-1)),
        )
    return set()


def _register_dataclasses(unit: nn.Module, inputs: Any, output: Any) -> None:
    """A forward hook that runs before FSDP2's own, which then finds the tensors in an output that is a dataclass."""
    register_dataclasses(output)


def _follow_requires_grad(unit: nn.Module, inputs: Any) -> None:
    """A forward hook that runs after FSDP2 has gathered the unit's weights. Loops that freeze weights for a while, such
    as those of a GAN, set `requires_grad` of the shards; FSDP2 reads it only when it gathers a weight for the first
    time."""
    assert isinstance(unit, FSDPModule)
    for group in fsdp_parameter_groups(unit):
        for parameter in group.fsdp_params:
            if was_gathered(parameter) and parameter.unsharded_param.is_leaf:
                parameter.unsharded_param.requires_grad_(parameter.sharded_param.requires_grad)


def _keep_gradient_hooks(module: nn.Module, hooks: dict[str, tuple[list[Any], list[Any]]]) -> None:
    """Registers the hooks that the user's parameters had before they were sharded with the gathered weights, which
    replace these parameters. The hooks get this rank's gradient of the whole weight. `hooks` has, by parameter name,
    the hooks of the gradient and those that run after it was accumulated."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    sharded = [parameter for group in _parameter_groups(module) for parameter in group.fsdp_params]
    pending = [(parameter, hooks[name]) for parameter in sharded if (name := names[parameter.sharded_param]) in hooks]

    def register(*_: Any) -> None:
        for entry in [entry for entry in pending if was_gathered(entry[0])]:
            parameter, (of_gradient, after_accumulation) = entry
            for hook in of_gradient:
                parameter.unsharded_param.register_hook(hook)
            for hook in after_accumulation:
                parameter.unsharded_param.register_post_accumulate_grad_hook(hook)
            pending.remove(entry)

    module.register_forward_hook(register)


@contextmanager
def gradient_synchronization(module: nn.Module, plan: Plan, first: bool, last: bool) -> Iterator[None]:
    """The context in which the forward and backward pass of one microbatch runs. `first` and `last` say whether it is
    the first or last microbatch of its step. After the last one, the gradients of the parameters (which are shards) are
    the mean over the data ranks."""
    assert isinstance(module, FSDPModule)
    level = plan.memory.sharding
    if first:
        broadcast_buffers_over(module, _data_groups(module))
    module.set_requires_gradient_sync(last or level != "optimizer")
    module.set_requires_all_reduce(last)  # over the replicate axis
    module.set_reshard_after_backward(last or level == "parameters")
    module.set_is_last_backward(last)
    for group in () if first else _parameter_groups(module):
        # In the backward pass FSDP2 prefetches units in the reverse order of all forward passes that it has seen. If it
        # remembered earlier microbatches, it would go on from this one's first unit to the last unit of the one before.
        forget_forward_order(group)
    yield
    if last:
        finish_step(module)


@contextmanager
def backward_synchronization(module: nn.Module, plan: Plan, synchronize: bool) -> Iterator[None]:
    """The context of a backward pass that a user's own loop runs. With `synchronize`, the gradients of the parameters
    (which are shards) are afterwards the mean over the data ranks of all that was accumulated in them."""
    assert isinstance(module, FSDPModule)
    level = plan.memory.sharding
    module.set_requires_gradient_sync(synchronize or level != "optimizer")
    module.set_requires_all_reduce(synchronize)  # over the replicate axis
    module.set_reshard_after_backward(synchronize or level == "parameters")
    module.set_is_last_backward(True)
    for group in _parameter_groups(module):  # what earlier passes have accumulated, and the loop has not set to None
        known = {parameter for parameter in group.fsdp_params if _has_gradient(parameter)}
        group.post_backward.used = known - group.post_backward.zeros
    yield
    if synchronize:
        finish_step(module)


def finish_step(module: nn.Module) -> None:
    """Averages the gradients of weights that FSDP2 does not shard, and sets the gradients of weights that no rank has
    used to None. Every data rank calls this after a step's last backward pass."""
    groups = _data_groups(module)
    experts = set(divided_parameters(module))
    sharded = [parameter for group in _parameter_groups(module) for parameter in group.fsdp_params]
    sharded = [parameter for parameter in sharded if parameter.sharded_param.requires_grad]
    used = {parameter for group in _parameter_groups(module) for parameter in group.post_backward.used}
    for post_backward in (group.post_backward for group in _parameter_groups(module)):
        post_backward.used, post_backward.zeros = set(), set()
    whole = [p for p in module.parameters() if p.requires_grad and not isinstance(p, DTensor)]
    average_once([parameter for parameter in whole if parameter not in experts], groups)
    average_once([parameter for parameter in whole if parameter in experts], groups[:-1])  # over the replicate axis
    if not sharded:
        return
    users = torch.tensor([parameter in used for parameter in sharded], dtype=torch.int32)
    some_unused = not bool(users.all())
    users = users.to(sharded[0].sharded_param.device)
    for process_group in groups:
        dist.all_reduce(users, group=process_group)
    if some_unused:  # a rank that used all weights need not wait for the device
        for parameter, user_count in zip(sharded, users.tolist(), strict=True):
            if not user_count:
                parameter.sharded_param.grad = None


def reshard(module: nn.Module) -> None:
    """Frees gathered weights; the module's parameters are then the shards. The next forward pass gathers again."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def gather(module: nn.Module) -> None:
    """Gathers all weights, and leaves them gathered after forward passes, so that these need no other rank. This ends
    with `release`. All ranks call this together."""
    with torch.inference_mode(False), torch.no_grad():  # weights gathered under `inference_mode` could not be trained
        for unit in module.modules():
            if isinstance(unit, FSDPModule):
                unit.unshard()
    for group in _parameter_groups(module):
        keep_gathered(group)


def release(module: nn.Module) -> None:
    """Frees the weights that `gather` has gathered. From now on, forward passes gather them as the plan says."""
    for group in _parameter_groups(module):
        free_gathered(group)


class _PreBackward:
    """Replaces the `_pre_backward` method of an FSDP2 unit, which prepares the unit for its backward pass. While the
    forward pass of the model runs, it only gathers the unit's weights: the model differentiates its output, and the
    backward pass, which differentiates once more, needs the weights until its end."""

    ignores_gradient = True  # it returns the gradient that it is called with (chunked_loss/scores.py)

    def __init__(self, unit: FSDPModule, original: Callable[[Tensor], Tensor]) -> None:
        self._unit = unit
        self._original = original

    def __call__(self, gradient: Tensor) -> Tensor:
        if not forward_is_running(self._unit):
            return self._original(gradient)
        for group in fsdp_parameter_groups(self._unit):
            gather_until_backward(group)
            group.post_backward.waits_for_end = True
        return gradient


class _PostBackward:
    """Replaces the `post_backward` method of an FSDP2 unit. It records in `used` the weights that have a gradient,
    gives the other weights a gradient of zeros, because all ranks have to reduce the same gradients, and then calls the
    original method. It does nothing while the forward pass of the model runs; and if the model differentiates in its
    forward pass (`waits_for_end`), until the end of the backward pass, where FSDP2 calls it again."""

    def __init__(self, unit: FSDPModule, group: Any) -> None:
        self._unit = unit
        self._group = group
        self._original = group.post_backward
        self.used: set[Any] = set()
        self.zeros: set[Any] = set()  # weights that have nothing but these zeros since gradients were last combined
        self.waits_for_end = False

    def __call__(self, *unused: Any) -> None:
        if forward_is_running(self._unit) or (self.waits_for_end and in_backward_node()):
            return
        for parameter in self._group.fsdp_params:
            if not parameter.sharded_param.requires_grad or not was_gathered(parameter):
                continue
            gathered = parameter.unsharded_param
            if _has_unsharded_gradient(parameter):
                self.used.add(parameter)
                self.zeros.discard(parameter)
            elif self._group.reduce_grads:
                if not _has_gradient(parameter):
                    self.zeros.add(parameter)
                gathered.grad = torch.zeros(gathered.shape, dtype=gathered.dtype, device=gathered.device)
        self._original(*unused)


def _has_gradient(parameter: Any) -> bool:
    """Whether a weight (an `FSDPParam`) has a gradient, sharded or not."""
    if parameter.sharded_param.grad is not None:
        return True
    return was_gathered(parameter) and _has_unsharded_gradient(parameter)


def _has_unsharded_gradient(parameter: Any) -> bool:
    """Whether a weight that was gathered has a gradient that is not reduced yet."""
    return parameter.unsharded_param.grad is not None or parameter.unsharded_accumulated_grad is not None


def _unit_blocks(module: nn.Module) -> list[nn.Module]:
    """The blocks that become FSDP2 units of their own. A block with a weight that is tied to a module outside of it is
    left out, because both uses of the weight have to be gathered together. A block of which only a part runs in this
    pipeline stage is left out too: FSDP2 starts a unit's backward pass at the block's output, and that is not what
    leaves the stage."""
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for child in module.modules():
        for parameter in child._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, set()).add(child)
    blocks = [module.get_submodule(name) for name in find_blocks(module)]
    unique = list(dict.fromkeys(block for block in blocks if block is not module))
    complete = [b for b in unique if not any(isinstance(child, RemoteModule) for child in b.modules())]
    return [b for b in complete if all(owners[p] <= set(b.modules()) for p in b.parameters())]


def _unshardable(parameters: Iterable[nn.Parameter]) -> set[nn.Parameter]:
    """The weights of a unit that FSDP2 refuses to shard: single numbers, and trainable weights whose dtype is not the
    one that most of the unit's trainable elements have."""
    candidates = list(parameters)
    sizes: Counter[torch.dtype] = Counter()
    for parameter in candidates:
        if parameter.requires_grad:
            sizes[parameter.dtype] += parameter.numel()
    dtype = sizes.most_common(1)[0][0] if sizes else None
    return {p for p in candidates if p.dim() == 0 or (p.requires_grad and p.dtype != dtype)}


def _parameter_groups(module: nn.Module) -> Iterator[Any]:
    """Yields FSDP2's records (`FSDPParamGroup`) of the parameters that are gathered together."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            yield from fsdp_parameter_groups(unit)


def _data_groups(module: nn.Module) -> list[dist.ProcessGroup]:
    """The process groups of the data axes (replicate, and the ranks over which weights are sharded) that FSDP2 was
    given; empty if nothing is sharded. Those of experts, which are smaller, are not meant."""
    meshes: list[DeviceMesh] = [group.mesh_info.mesh for group in _parameter_groups(module)]
    largest = max(meshes, key=lambda mesh: mesh.size(), default=None)
    return [largest.get_group(axis) for axis in range(largest.ndim)] if largest is not None else []
