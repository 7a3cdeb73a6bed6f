"""Where the recorder listens: functions of torch are replaced by ones that call it, too. Nothing else of what they
compute changes."""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from . import dropout
from .layouts import is_dtensor, local
from .recorder import recorder
from .replaced import replace

_IGNORED_INDEX = -100


def after_import(module: ModuleType) -> None:
    """Called when torch was imported."""
    watch_torch()
    _watch_errors()
    _watch_process_group()


def watch_torch() -> None:
    _wait_for_first_call()
    _watch_backward()
    _watch_optimizers()
    _watch_clipping()
    _watch_scaler()
    _watch_losses()
    _watch_autocast()
    _watch_samplers()
    if not recorder().settings.keep_dropout:
        dropout.turn_off_functions()


def _wait_for_first_call() -> None:
    original = nn.Module.__call__

    @functools.wraps(original)
    def call(module: nn.Module, *arguments: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling() and _trains(module) and recorder().concerns(module):
            nn.Module.__call__ = original  # type: ignore[method-assign]
            recorder().first_call(module)
        return original(module, *arguments, **named)

    replace(nn.Module, "__call__", call)


def _trains(module: nn.Module) -> bool:
    if not module.training or not torch.is_grad_enabled():
        return False
    return any(parameter.requires_grad for parameter in module.parameters())


def _watch_backward() -> None:
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, grad_tensors: Any = None, *arguments: Any, **named: Any) -> Any:
        own = recorder()
        if own.is_recording and grad_tensors is None and own.backward_depth == 0:
            for tensor in [tensors] if isinstance(tensors, Tensor) else list(tensors):
                own.loss(tensor)
        own.backward_depth += 1
        try:
            return original(tensors, grad_tensors, *arguments, **named)
        finally:
            own.backward_depth -= 1

    replace(torch.autograd, "backward", backward)


def _watch_optimizers() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    disable, handles = torch.compiler.disable, recorder().handles
    handles.append(register_optimizer_step_pre_hook(disable(_before_step)))
    handles.append(register_optimizer_step_post_hook(disable(lambda *_: recorder().after_optimizer_step())))


def _before_step(
    optimizer: Any, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Called before a step of an optimizer, which is the first of the arguments. Returns the arguments with another
    closure if there is one: gradients are computed in it, as with Lightning's Trainer, and are written after it."""
    own = recorder()
    depth = own.before_optimizer_step()
    closure = named["closure"] if "closure" in named else next(iter(arguments[1:]), None)
    if not callable(closure):
        own.gradients_computed(optimizer, depth)
        return None

    def watched() -> Any:
        own.before_closure()
        result = closure()
        own.gradients_computed(optimizer, depth)
        return result

    if "closure" in named:
        return arguments, {**named, "closure": watched}
    return (arguments[0], watched, *arguments[2:]), named


def _watch_clipping() -> None:
    """The last two functions have names with an underscore in the file that defines them."""
    import torch.nn.utils.clip_grad as clip

    for owner in (clip, torch.nn.utils):
        for name in (
            "clip_grad_norm_",
            "clip_grad_norm",
            "clip_grad_value_",
            "get_total_norm",
            "clip_grads_with_norm_",
        ):
            for own_name in (name, f"_{name}"):
                original = getattr(owner, own_name, None)
                if original is not None:
                    replace(owner, own_name, _watched_clip(name, original))


_CLIPPING: list[str] = []  # the functions of clipping that are being computed: some call others


def _watched_clip(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def watched(first: Any, *arguments: Any, **named: Any) -> Any:
        own = recorder()
        if not own.is_recording:
            return original(first, *arguments, **named)
        first = first if isinstance(first, Tensor) else list(first)
        names = own.before_clipping(_parameters_of(name, first))
        _CLIPPING.append(name)
        try:
            result = original(first, *arguments, **named)
        finally:
            _CLIPPING.pop()
        if not _CLIPPING and name not in ("get_total_norm", "clip_grad_value_"):
            limit = arguments[0] if arguments else named.get("max_norm")
            given = arguments[1] if len(arguments) > 1 else named.get("total_norm")
            value = given if name == "clip_grads_with_norm_" else result
            own.norm(value, None if limit is None else float(limit), names)
        return result

    return watched


def _parameters_of(name: str, values: Any) -> list[Tensor]:
    """The parameters that a function of clipping is given; `get_total_norm` is given their gradients."""
    tensors = [values] if isinstance(values, Tensor) else values
    if name != "get_total_norm":
        return tensors
    wanted = {_storage_of(tensor) for tensor in tensors}
    return [
        parameter
        for root in recorder().roots
        for parameter in root.parameters()
        if parameter.grad is not None and _storage_of(parameter.grad) in wanted
    ]


def _storage_of(value: Any) -> tuple[int, int]:
    """Where a tensor, or this rank's part of a DTensor, lies: a script may give the part itself to a function."""
    part = local(value)
    assert part is not None
    return part.data_ptr() or id(value), part.numel()


def _watch_scaler() -> None:
    from torch.amp import GradScaler

    original = GradScaler.step

    @functools.wraps(original)
    def step(scaler: Any, optimizer: Any, *arguments: Any, **named: Any) -> Any:
        own = recorder()
        if own.is_recording and scaler.is_enabled():
            own.scale(float(scaler.get_scale()))
        return original(scaler, optimizer, *arguments, **named)

    replace(GradScaler, "step", step)


def _watch_losses() -> None:
    functional = torch.nn.functional
    for name in ("cross_entropy", "nll_loss"):
        replace(functional, name, _watched_loss(getattr(functional, name)))


def _watched_loss(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def watched(input: Tensor, target: Tensor, *arguments: Any, **named: Any) -> Tensor:
        result = original(input, target, *arguments, **named)
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            own = recorder()
            if own.is_recording and not target.dtype.is_floating_point and input.requires_grad:
                ignored = named.get("ignore_index", arguments[2] if len(arguments) > 2 else _IGNORED_INDEX)
                reduction = named.get("reduction", arguments[4] if len(arguments) > 4 else "mean")
                valid = int((target != ignored).sum())
                own.targets(valid, target.numel(), _sum_of(result, reduction, valid))
        return result

    return watched


def _sum_of(result: Tensor, reduction: str, valid: int) -> float | None:
    """The sum of the losses of all valid targets; None if the script reduces them itself."""
    if is_dtensor(result) or result.numel() != 1 or reduction not in ("mean", "sum") or not valid:
        return None
    return float(result.detach()) * (valid if reduction == "mean" else 1)


def _watch_autocast() -> None:
    original = torch.autocast.__enter__

    @functools.wraps(original)
    def enter(context: Any) -> Any:
        if not torch.compiler.is_compiling() and getattr(context, "_enabled", False):
            recorder().dtypes.add(str(context.fast_dtype).removeprefix("torch."))
        return original(context)

    replace(torch.autocast, "__enter__", enter)


def _watch_samplers() -> None:
    from torch.utils.data import DistributedSampler, RandomSampler

    for kind in (DistributedSampler, RandomSampler):
        replace(kind, "__init__", _watched_making(kind.__init__))
        replace(kind, "__iter__", _watched_sampler(kind.__name__, kind.__iter__))


_MAKERS: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # of each sampler, the package that made it


def _watched_making(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def make(sampler: Any, *arguments: Any, **named: Any) -> None:
        _MAKERS[sampler] = _calling_package()
        original(sampler, *arguments, **named)

    return make


def _calling_package() -> str:
    """The package whose code called torch; empty for the script and modules beside it."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
        frame = frame.f_back  # type: ignore[assignment]
    name, file = (frame.f_globals.get(key) or "" for key in ("__name__", "__file__")) if frame is not None else ("", "")
    return name.partition(".")[0] if "site-packages" in file else ""


def _watched_sampler(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def iterate(sampler: Any) -> Any:
        if getattr(sampler, "shuffle", True):
            recorder().samplers.add((name, _MAKERS.get(sampler, "")))
        return original(sampler)

    return iterate


def _watch_errors() -> None:
    original = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        recorder().end("error", f"{kind.__name__}: {error}")
        original(kind, error, trace)

    sys.excepthook = hook


def _watch_process_group() -> None:
    """A rank is done before its process group ends: when that ends on one rank, others may crash."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    original = dist.destroy_process_group

    @functools.wraps(original)
    def destroy_process_group(*arguments: Any, **named: Any) -> None:
        recorder().end_if_done()
        original(*arguments, **named)

    dist.destroy_process_group = destroy_process_group
