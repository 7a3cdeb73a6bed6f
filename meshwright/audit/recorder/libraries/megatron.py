"""Megatron core: which part of which whole tensor a rank's parameter is, as the model's `sharded_state_dict` states it,
with the factories by which fused layers divide their parts; gradients in `main_grad`; and clipping by its functions."""

import functools
import gc
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import layouts
from ..model.module_names import module_prefixes, named_buffers
from ..parts import Held, Part, Region, whole_region
from ..recorder import AFTER_START, recorder
from .megatron_shards import OwnRange, divided_parts, own_ranges


def after_import(module: Any) -> None:
    """Called when Megatron's module of models, or that of its functions for clipping, was imported."""
    if hold_megatron not in layouts.LIBRARIES:
        layouts.LIBRARIES.append(hold_megatron)
        AFTER_START.append(reload_main_weights)
    if hasattr(module, "get_grad_norm_fp32"):
        module.get_grad_norm_fp32 = _watched_norm(module.get_grad_norm_fp32)
        module.clip_grad_by_total_norm_fp32 = _watched_clip(module.clip_grad_by_total_norm_fp32)


def hold_megatron(roots: list[nn.Module]) -> tuple[dict[str, Held], dict[str, Held]] | None:
    """Returns the parameters and buffers of models of Megatron; None if a root is another model."""
    models = [_unwrapped(root) for root in roots]
    if not all(hasattr(model, "sharded_state_dict") for model in models):
        return None
    parameters: dict[str, Held] = {}
    buffers: dict[str, Held] = {}
    ranges = own_ranges()
    for model in models:
        for held in _hold(model, ranges):
            parameters.setdefault(held.name, held)
        for entry in named_buffers(module_prefixes(model)):
            value = entry.tensor
            part = Part(whole_region(value.shape), functools.partial(_detached, value), lambda: None)
            buffers.setdefault(entry.name, Held(entry.name, tuple(value.shape), value.dtype, (part,), trained=False))
    _tie(parameters)
    return parameters, buffers


def _unwrapped(root: nn.Module) -> nn.Module:
    inner = getattr(root, "module", None)
    return _unwrapped(inner) if isinstance(inner, nn.Module) else root


def _hold(model: Any, ranges: dict[int, OwnRange] | None) -> Iterator[Held]:
    described = model.sharded_state_dict(metadata=_metadata())
    for name, parameter in model.named_parameters(remove_duplicate=False):
        entry = described.get(name)
        pieces = list(_pieces(entry, parameter))
        own = None if ranges is None else ranges.get(id(parameter), OwnRange())
        known = (parameter, getattr(parameter, "main_param", None), own and own.main)
        held = Held(
            _with_global_numbers(name, getattr(entry, "key", name), pieces),
            tuple(parameter.shape),
            parameter.dtype,
            (),
            parameter.requires_grad,
            ids=tuple(dict.fromkeys(id(tensor) for tensor in known if tensor is not None)),
        )
        if pieces:
            held.shape = _global_shape(pieces[0])
            held.parts = tuple(_part_of(piece, parameter) for piece in pieces)
            held.layout = "sharded_state_dict of Megatron"
        else:
            held.parts = (_part(whole_region(parameter.shape), parameter, tuple(parameter.shape), 0),)
        if own is not None:
            firsts = [_first_of(piece, parameter) for piece in pieces] or [0]
            wholes = [
                (part.region.box or (), first, part.weight) for part, first in zip(held.parts, firsts, strict=True)
            ]
            held.parts = tuple(divided_parts(wholes, own))
        yield held


def _metadata() -> dict[str, Any]:
    metadata: dict[str, Any] = {"non_homogeneous_layers": True}  # keys with the numbers of layers
    try:
        from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
    except ImportError:
        return metadata
    completed: dict[str, Any] = ensure_metadata_has_dp_cp_group(metadata)
    return completed


def _with_global_numbers(name: str, key: str, pieces: list[Any]) -> str:
    """The name of a parameter with the numbers that its layer and its expert have in the whole model: that of the layer
    stands in the key, and that of the expert is where the parameter lies in all experts' together."""
    number = re.search(r"layers\.(\d+)\.", key)
    name = re.sub(r"layers\.\d+\.", number.group(0), name, count=1) if number else name
    if pieces and pieces[0].prepend_axis_num:
        expert = pieces[0].global_offset[pieces[0].prepend_axis_num - 1]
        name = re.sub(r"local_experts\.\d+\.", f"local_experts.{expert}.", name, count=1)
    return name


def _pieces(entry: Any, parameter: Tensor) -> Iterator[Any]:
    """The ShardedTensors of a parameter: one, or those that its factory builds. Yields none where a piece is no view
    of the parameter."""
    if entry is None:
        return
    with torch.no_grad():
        built = entry.build() if hasattr(entry, "build") else entry
    pieces = list(built.values()) if isinstance(built, dict) else built if isinstance(built, list) else [built]
    storage = parameter.untyped_storage().data_ptr()
    if all(getattr(piece, "data", None) is not None for piece in pieces) and all(
        piece.data.untyped_storage().data_ptr() == storage for piece in pieces
    ):
        yield from pieces


def _global_shape(piece: Any) -> tuple[int, ...]:
    return tuple(piece.global_shape[piece.prepend_axis_num :])


def _part_of(piece: Any, parameter: Tensor) -> Part:
    offsets = piece.global_offset[piece.prepend_axis_num :]
    box = tuple((int(start), int(size)) for start, size in zip(offsets, piece.data.shape, strict=True))
    return _part(Region(box=box), parameter, tuple(piece.data.shape), _first_of(piece, parameter))


def _first_of(piece: Any, parameter: Tensor) -> int:
    """The element of the parameter that a piece of it starts at."""
    return int(piece.data.storage_offset() - parameter.storage_offset())


def _part(region: Region, parameter: Any, shape: tuple[int, ...], first: int) -> Part:
    """The part of a parameter that starts at element `first` of it and has this shape."""

    def view(value: Tensor) -> Tensor:
        return value.as_strided(shape, parameter.stride(), value.storage_offset() + first)

    def gradient() -> Tensor | None:
        value = _gradient(parameter)
        return None if value is None else view(value.detach().contiguous())

    return Part(region, lambda: view(parameter.detach()), gradient)


def _gradient(parameter: Any) -> Tensor | None:
    """The gradient where it is furthest: of the optimizer's fp32 copy, of the parameter, or accumulated."""
    main = getattr(parameter, "main_param", None)
    for value in (getattr(main, "grad", None), parameter.grad, getattr(parameter, "main_grad", None)):
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            return value
    return None


def _detached(value: Tensor) -> Tensor:
    return value.detach()


def _tie(parameters: dict[str, Held]) -> None:
    first: dict[int, str] = {}
    for held in parameters.values():
        name = first.setdefault(held.ids[0], held.name)
        held.same_as = name if name != held.name else None


def reload_main_weights(roots: list[nn.Module]) -> None:
    """Copies the model's weights to those that Megatron's optimizers hold in fp32."""
    for value in gc.get_objects():
        if any(kind.__name__ == "MegatronOptimizer" for kind in type(value).__mro__):
            value.reload_model_params()


# ---- clipping


def _watched_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def norm(*arguments: Any, **named: Any) -> Any:
        own = recorder()
        if own.is_recording:
            own.before_clipping(parameter for root in own.roots for parameter in root.parameters())
        return original(*arguments, **named)

    return norm


def _watched_clip(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(parameters: Any, max_norm: float, total_norm: float, *arguments: Any, **named: Any) -> Any:
        own = recorder()
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if own.is_recording:
            own.norm(float(total_norm), float(max_norm), own.known_names(listed))
        return original(listed, max_norm, total_norm, *arguments, **named)

    return clip
