"""Divides a module by a plan, for training loops that belong to Lightning.

Usually the whole module is one part: a training step is one call of it, and its backward pass comes after that. Under
manual optimization, backward passes and optimizer steps run within the training step. Then each submodule that the
step calls is a part of its own, because FSDP2 frees and reduces when the call of a unit is over.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from meshwright.errors import InputError
from meshwright.parallel.apply import apply
from meshwright.parallel.mesh import build_mesh
from meshwright.parallel.torch_private import broadcast_coalesced
from meshwright.plan import Plan
from meshwright.plan_fields.groups import MIB
from meshwright.train.drive.driver import Driver

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # are never called themselves


def divide_module(
    module: nn.Module, plan: Plan, device: torch.device, world_size: int, *, in_parts: bool = False
) -> Driver:
    """Applies the plan to a module that is on the device already, in place. With `in_parts`, each submodule that has
    parameters is a part of its own. All ranks get the weights of rank 0. All ranks call this together."""
    mesh = build_mesh(plan, device.type, world_size)
    if mesh is not None:
        _broadcast_from_first_rank(module)
    called = list(_called_submodules(module)) if in_parts else [module]
    if in_parts:
        _refuse_shared_weights(called)
    parts = [apply(plan, part, device, world_size) for part in called]
    driver = Driver(module, parts, plan, device, mesh)
    driver.lay_out_gradients()
    if driver.is_sharded:
        shards = [list(part.parameters().values()) for part in parts]
        for owner, parameters in zip(called, shards, strict=True):
            _zero_gradients_of_shards(owner, parameters)
        if in_parts:
            _zero_gradients_of_shards(module, [p for parameters in shards for p in parameters])
        driver.take_whole_tensors()
    return driver


def _called_submodules(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the direct submodules that have parameters; of lists and dicts of modules, their elements."""
    for child in module.children():
        if isinstance(child, _CONTAINERS):
            yield from _called_submodules(child)
        elif any(True for _ in child.parameters()):
            yield child


def _refuse_shared_weights(parts: Sequence[nn.Module]) -> None:
    owners: dict[int, nn.Module] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            owner = owners.setdefault(id(parameter), part)
            if owner is not part:
                raise InputError(
                    f"{type(owner).__name__} and {type(part).__name__} share the weight {name}: under manual"
                    " optimization each submodule is divided alone, so put both into one submodule whose forward calls"
                    " them"
                )


def _zero_gradients_of_shards(module: nn.Module, shards: Sequence[nn.Parameter]) -> None:
    """Makes `module.zero_grad` find the gradients of the shards also while FSDP2 has gathered the weights, when the
    module's parameters are other tensors."""
    original = module.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        original(set_to_none)
        for parameter in shards:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    module.zero_grad = zero_grad  # type: ignore[method-assign]


def _broadcast_from_first_rank(module: nn.Module) -> None:
    """Gives all ranks the weights and buffers of rank 0."""
    tensors = [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]
    assert dist.group.WORLD is not None
    if tensors:
        broadcast_coalesced(dist.group.WORLD, tensors, 25 * MIB)
