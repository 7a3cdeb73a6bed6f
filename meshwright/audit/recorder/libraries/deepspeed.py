"""DeepSpeed: the weights that ZeRO divides over ranks, the fp32 weights that its optimizers step, and their gradients.

Stages 1 and 2 keep whole weights, and divide the optimizer's: a rank holds a range of the flattened weight, which the
parameter's `_hp_mapping` describes. Stage 3 divides the weights, too: the ranges lie one after the other in the order
of the ranks (`ds_tensor`). The optimizer inside of the engine steps flat tensors, once for each group of parameters."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import layouts
from ..model.module_names import module_prefixes, named_buffers, named_parameters
from ..parts import Held, Part, Region, whole_region
from ..recorder import AFTER_START, recorder


def after_import(module: ModuleType) -> None:
    """Called when DeepSpeed's engine was imported."""
    layouts.LIBRARIES.append(hold_zero)
    AFTER_START.append(copy_to_optimizer)
    register_optimizer_step_pre_hook(lambda optimizer, *_: _before_inner_step(optimizer))
    engine = module.DeepSpeedEngine
    engine._take_model_step = _watched_step(engine._take_model_step)


def hold_zero(roots: list[nn.Module]) -> tuple[dict[str, Held], dict[str, Held]] | None:
    """Returns the parameters and buffers of an engine with ZeRO; None if there is no such engine."""
    if not any(_is_divided(parameter) for root in roots for parameter in root.parameters()):
        return None
    parameters: dict[str, Held] = {}
    buffers: dict[str, Held] = {}
    first: dict[int, str] = {}
    flat = _flat_weights(roots)
    for prefix, root in zip(layouts.root_prefixes(roots), roots, strict=True):
        prefixes = module_prefixes(root, prefix)
        for entry in named_parameters(prefixes):
            parameter = entry.tensor
            held = _hold_stage_3(entry.name, parameter) if _is_stage_3(parameter) else None
            held = held or _hold_stage_1_or_2(entry.name, parameter, flat)
            name = first.setdefault(id(parameter), entry.name)
            held.same_as = name if name != entry.name else None
            parameters.setdefault(entry.name, held)
        for entry in named_buffers(prefixes):
            value = entry.tensor
            part = Part(whole_region(value.shape), functools.partial(_detached, value), lambda: None)
            buffers.setdefault(entry.name, Held(entry.name, tuple(value.shape), value.dtype, (part,), trained=False))
    return parameters, buffers


def _is_divided(parameter: Any) -> bool:
    return _is_stage_3(parameter) or hasattr(parameter, "_hp_mapping")


def _is_stage_3(parameter: Any) -> bool:
    return hasattr(parameter, "ds_id") and hasattr(parameter, "ds_tensor")


def _detached(value: Tensor) -> Tensor:
    return value.detach()


def _flat_weights(roots: list[nn.Module]) -> list[Tensor]:
    """The flat tensors that the optimizers inside of the engines step."""
    inner = [getattr(getattr(root, "optimizer", None), "optimizer", None) for root in roots]
    groups = [group for optimizer in inner for group in getattr(optimizer, "param_groups", ())]
    return [tensor for group in groups for tensor in group["params"]]


# ---- stages 1 and 2


def _hold_stage_1_or_2(name: str, parameter: Any, flat: list[Tensor]) -> Held:
    whole = Part(whole_region(parameter.shape), lambda: parameter.detach(), lambda: None)
    mapping = getattr(parameter, "_hp_mapping", None)
    ids = [id(parameter)]
    parts = [whole]
    if mapping is not None:
        address, fragment = mapping.lp_fragment_address, mapping.hp_fragment
        region = Region(flat=(address.start, address.start + address.numel))
        stepped = next((tensor for tensor in flat if _same_storage(tensor, fragment)), None)
        if stepped is not None:
            ids.append(id(stepped))
        parts.append(Part(region, lambda: None, _range_gradient(parameter, mapping, stepped)))
    elif not hasattr(parameter, "_hp_mapping"):
        parts = [Part(whole.region, whole.weight, lambda: parameter.grad)]
    trained = parameter.requires_grad
    return Held(name, tuple(parameter.shape), parameter.dtype, tuple(parts), trained, "ZeRO 1 or 2", ids=tuple(ids))


def _same_storage(flat: Tensor, fragment: Tensor) -> bool:
    return flat.untyped_storage().data_ptr() == fragment.untyped_storage().data_ptr()


def _range_gradient(parameter: Any, mapping: Any, stepped: Tensor | None) -> Callable[[], Tensor | None]:
    """Reads the gradient of the range that this rank steps: that of the flat tensor where it has one, before that the
    averaged gradients of the group."""
    place = mapping.hp_fragment_address

    def read() -> Tensor | None:
        if stepped is not None and stepped.grad is not None:
            return stepped.grad.reshape(-1)[place.start : place.start + place.numel]
        try:
            fragment: Tensor = mapping.get_lp_grad_fragment(parameter._index_in_param_group)
        except (ValueError, KeyError, IndexError, AttributeError):
            return None
        fragment = fragment.detach().reshape(-1)
        if fragment.numel() != place.numel:  # BF16_Optimizer has the whole gradient
            start = mapping.lp_fragment_address.start
            fragment = fragment[start : start + place.numel]
        return fragment

    return read


# ---- stage 3


def _hold_stage_3(name: str, parameter: Any) -> Held:
    zero: Any = getattr(parameter, "_z3_optimizer", None)
    size = parameter.ds_tensor.ds_numel
    start = min(parameter.ds_numel, size * _place(parameter))
    count = min(size, parameter.ds_numel - start)
    ids = [id(parameter)]
    place = stepped = None
    if zero is not None and parameter.requires_grad:
        group, first, _ = zero.grad_position[zero.get_param_id(parameter)]
        stepped, place = zero.fp32_partitioned_groups_flat[group], slice(first, first + count)
        ids.append(id(stepped))

    def gradient() -> Tensor | None:
        if stepped is None or place is None:
            return None
        if stepped.grad is not None:
            return stepped.grad.reshape(-1)[place]
        found: Tensor | None = zero.get_local_fp32_grad_for_param(parameter)
        return None if found is None else found.detach().reshape(-1)[:count]

    def gathered() -> Tensor | None:
        return parameter.detach() if tuple(parameter.shape) == tuple(parameter.ds_shape) else None

    own = Part(Region(flat=(start, start + count)), lambda: parameter.ds_tensor.detach()[:count], gradient)
    whole = Part(whole_region(parameter.ds_shape), gathered, lambda: None)  # small weights stay whole on each rank
    parts = (own, whole)
    return Held(
        name, tuple(parameter.ds_shape), parameter.dtype, parts, parameter.requires_grad, "ZeRO 3", ids=tuple(ids)
    )


def _place(parameter: Any) -> int:
    import torch.distributed as dist

    return dist.get_rank(parameter.ds_process_group)


# ---- what happens in a step


def copy_to_optimizer(roots: list[nn.Module]) -> None:
    """Copies the weights of the start to those that the optimizer steps."""
    parameters: list[Any] = [parameter for root in roots for parameter in root.parameters()]
    for parameter in parameters:
        if _is_stage_3(parameter):
            zero = getattr(parameter, "_z3_optimizer", None)
            if zero is not None and parameter.requires_grad:
                zero.set_local_hp_param(parameter.ds_tensor.detach().float(), parameter)
        elif getattr(parameter, "_hp_mapping", None) is not None:
            parameter._hp_mapping.update_hp()


_engines: list[Any] = []  # whose step is being taken


def _watched_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(engine: Any, *arguments: Any, **named: Any) -> Any:
        own = recorder()
        if not own.is_recording or not any(_is_divided(parameter) for parameter in engine.parameters()):
            return original(engine, *arguments, **named)
        own.flush()
        names = own.before_clipping(engine.parameters())
        _engines.append(engine)
        own.step_depth += 1  # the steps of the optimizer inside, one for each group, are no steps of their own
        try:
            result = original(engine, *arguments, **named)
        finally:
            own.step_depth -= 1
            _engines.pop()
        if engine.gradient_clipping() > 0.0 and engine.get_global_grad_norm() is not None:
            own.norm(float(engine.get_global_grad_norm()), float(engine.gradient_clipping()), names)
        own.write_step(type(engine.optimizer).__name__, id(engine), [])
        own.pending.update(names)
        return result

    return step


def _before_inner_step(optimizer: Any) -> None:
    """Writes the gradients that one group of parameters is stepped with."""
    own = recorder()
    if not _engines or not own.is_recording:
        return
    if id(_engines[-1]) not in own.steps_of:
        own.steps_of[id(_engines[-1])] = 0
        own._write_options(optimizer)
    names = own.known_names(parameter for group in optimizer.param_groups for parameter in group["params"])
    own.write_gradients("gradient", names)
