"""`hold_model`: which parts of which whole tensors this rank holds, read from torch's own descriptions: plain
parameters, DTensors (FSDP2, tensor parallelism, hybrid sharding), and the flat parameters of FSDP1."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .model.module_names import NamedTensor, module_prefixes, named_buffers, named_parameters
from .parts import Held, Part, Region, whole_region

# Layouts of libraries: each takes the root modules and returns what it knows, or None where it is not concerned.
LibraryLayout = Callable[[list[nn.Module]], "tuple[dict[str, Held], dict[str, Held]] | None"]
LIBRARIES: list[LibraryLayout] = []


def hold_model(roots: list[nn.Module]) -> tuple[dict[str, Held], dict[str, Held]]:
    """Returns the parameters and the buffers of the models, by name."""
    for library in LIBRARIES:
        found = library(roots)
        if found is not None:
            return found
    parameters: dict[str, Held] = {}
    buffers: dict[str, Held] = {}
    names: dict[int, str] = {}
    for prefix, root in zip(root_prefixes(roots), roots, strict=True):
        prefixes = module_prefixes(root, prefix)
        for held in _hold_parameters(prefixes):
            _tie(held, names)
            parameters.setdefault(held.name, held)
        for entry in named_buffers(prefixes):
            buffers.setdefault(entry.name, _hold_one(entry))
    return parameters, buffers


def root_prefixes(roots: list[nn.Module]) -> list[str]:
    """The prefixes of the names of several models: none for a single one, otherwise their classes' names."""
    if len(roots) == 1:
        return [""]
    classes = [_innermost(root).__class__.__name__ for root in roots]
    counts: dict[str, int] = {}
    prefixes = []
    for name in classes:
        number = counts[name] = counts.get(name, -1) + 1
        prefixes.append(f"{name}{number if classes.count(name) > 1 else ''}.")
    return prefixes


def _innermost(root: nn.Module) -> nn.Module:
    """The module inside all that only wraps it."""
    return [module for module, prefix in module_prefixes(root).items() if not prefix][-1]


def _tie(held: Held, names: dict[int, str]) -> None:
    """Notes under which earlier name the same parameter was held."""
    if len(held.ids) == 1 and held.layout != "flat parameter of FSDP":
        first = names.setdefault(held.ids[0], held.name)
        held.same_as = first if first != held.name else None


def _hold_parameters(prefixes: dict[nn.Module, str]) -> Iterator[Held]:
    flat_parts = dict(_hold_flat_parameters(prefixes))
    for entry in named_parameters(prefixes):
        if not _is_flat(entry.tensor) and entry.name not in flat_parts:
            yield _hold_one(entry)
    yield from flat_parts.values()


def _hold_one(entry: NamedTensor) -> Held:
    tensor = entry.tensor
    trained = tensor.requires_grad
    if is_dtensor(tensor):
        part = Part(_dtensor_region(tensor), lambda: local(entry.tensor), lambda: _dtensor_gradient(entry.tensor))
        layout = "DTensor"
    else:
        part = Part(whole_region(tensor.shape), lambda: entry.tensor.detach(), lambda: _gradient(entry.tensor))
        layout = "whole"
    return Held(entry.name, tuple(tensor.shape), tensor.dtype, (part,), trained, layout, ids=(id(tensor),))


def _gradient(parameter: Tensor) -> Tensor | None:
    gradient = parameter.grad
    if gradient is not None and gradient.layout != torch.strided:
        gradient = gradient.to_dense()
    return gradient


# ---- DTensor


def is_dtensor(value: object) -> bool:
    """Whether a value is a DTensor. Its module is not imported for that."""
    return hasattr(value, "placements") and hasattr(value, "device_mesh")


def local(value: Any) -> Tensor | None:
    """This rank's part of a DTensor, or the tensor itself."""
    if value is None or not is_dtensor(value):
        return None if value is None else value.detach()
    part: Tensor = value._local_tensor.detach()
    return part.wait() if hasattr(part, "wait") else part


def _dtensor_gradient(parameter: Any) -> Tensor | None:
    """This rank's part of a DTensor's gradient, which may lie otherwise than the parameter (the optimizer moves it
    then). All ranks of the mesh step together, so they may communicate here."""
    gradient = parameter.grad
    if gradient is not None and is_dtensor(gradient) and gradient.placements != parameter.placements:
        with torch.no_grad():
            gradient = gradient.redistribute(placements=parameter.placements)
    return local(gradient)


def partial_sum(value: Any) -> tuple[bool, bool]:
    """Whether a norm is that of a part, whose square is still to be summed over ranks; and whether this rank's value
    belongs to the sum, and is not a copy of another one's."""
    placements = getattr(value, "placements", ())
    partial = ["Partial" in type(placement).__name__ for placement in placements]
    if not any(partial):
        return False, True
    coordinates = value.device_mesh.get_coordinate() or [0] * len(partial)
    return True, all(part or place == 0 for part, place in zip(partial, coordinates, strict=True))


def _dtensor_region(tensor: Any) -> Region:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Region(box=tuple(zip(map(int, offset), map(int, shape), strict=True)))


# ---- the flat parameters of FSDP1


def _is_flat(value: object) -> bool:
    return hasattr(value, "_shard_param_infos") and hasattr(value, "_param_infos")


def _hold_flat_parameters(prefixes: dict[nn.Module, str]) -> Iterator[tuple[str, Held]]:
    for module in prefixes:
        handle = getattr(module, "_handle", None)
        flat = getattr(handle, "flat_param", None)
        if flat is not None and _is_flat(flat):
            yield from ((held.name, held) for held in _hold_flat(handle, flat, prefixes))


def _hold_flat(handle: Any, flat: Any, prefixes: dict[nn.Module, str]) -> Iterator[Held]:
    uses_original = bool(getattr(handle, "_use_orig_params", False))
    rows = zip(flat._param_infos, flat._shard_param_infos, flat._shapes, strict=True)
    for (attribute, module, *_), shard, shape in rows:
        name = prefixes.get(module, "") + attribute
        parameter = getattr(module, attribute, None)
        parts: Iterable[Part] = ()
        if shard.in_shard:
            region = Region(flat=(shard.intra_param_start_idx, shard.intra_param_end_idx + 1))
            first, size = shard.offset_in_shard, shard.numel_in_shard
            parts = (Part(region, _flat_weight(flat, first, size), _flat_gradient(flat, parameter, first, size)),)
        known = parameter if uses_original and isinstance(parameter, Tensor) else flat
        yield Held(
            name,
            tuple(shape),
            flat.dtype,
            tuple(parts),
            known.requires_grad,
            "flat parameter of FSDP",
            ids=(id(known),),
        )


def _flat_weight(flat: Any, first: int, size: int) -> Callable[[], Tensor]:
    return lambda: getattr(flat, "_local_shard", flat).detach().reshape(-1)[first : first + size]


def _flat_gradient(flat: Any, parameter: Any, first: int, size: int) -> Callable[[], Tensor | None]:
    def read() -> Tensor | None:
        own = getattr(parameter, "grad", None)
        if own is not None:
            return own.detach().reshape(-1)
        if flat.grad is None:
            return None
        return flat.grad.detach().reshape(-1)[first : first + size]

    return read
