"""`find_roots`: the models of a process, found among all of its objects when one of their modules is first called."""

import gc
import sys

import torch
from torch import nn


def find_roots(called: nn.Module) -> list[nn.Module]:
    """The outermost modules that hold the called module, or parameters of an optimizer."""
    objects = [value for value in gc.get_objects() if _is_instance(value, (nn.Module, torch.optim.Optimizer))]
    modules = [value for value in objects if isinstance(value, nn.Module)]
    inner = {id(child) for module in modules for child in module._modules.values() if child is not None}
    inner |= {id(child) for module in modules for child in module.modules() if child is not module}
    optimized = {
        id(parameter)
        for optimizer in objects
        if isinstance(optimizer, torch.optim.Optimizer)
        for group in getattr(optimizer, "param_groups", ())
        for parameter in group["params"]
    }
    roots = [module for module in modules if id(module) not in inner and _is_root(module, called, optimized)]
    return _without_copies(roots, called) or [called]


def _is_instance(value: object, kinds: tuple[type, ...]) -> bool:
    """As isinstance, without the attribute `__class__`, with which other objects run code of their own."""
    return issubclass(type(value), kinds)


def _is_root(module: nn.Module, called: nn.Module, optimized: set[int]) -> bool:
    return any(child is called for child in module.modules()) or any(
        id(parameter) in optimized for parameter in module.parameters()
    )


def _without_copies(roots: list[nn.Module], called: nn.Module) -> list[nn.Module]:
    """Of modules that hold the same parameters, the one that is called, or otherwise the first."""
    kept: list[nn.Module] = []
    taken: set[int] = set()
    for root in sorted(roots, key=lambda root: root is not called):
        own = {id(parameter) for parameter in root.parameters()}
        if not own <= taken:
            kept.append(root)
            taken |= own
    return [root for root in roots if any(root is other for other in kept)]


def called_modules(roots: list[nn.Module], called: nn.Module) -> list[nn.Module]:
    others = [root for root in roots if not any(child is called for child in root.modules())]
    return [called, *others]


def pipeline_stage(roots: list[nn.Module]) -> int | None:
    """The number of the pipeline stage that this rank computes, if torch's pipelining does."""
    if "torch.distributed.pipelining" not in sys.modules:
        return None
    for value in gc.get_objects():
        if _is_instance(value, (nn.Module,)) or not hasattr(type(value), "__mro__"):
            continue
        if any(kind.__name__ == "_PipelineStageBase" for kind in type(value).__mro__):
            return int(value.stage_index)
    return None
