"""The sections `optimizer` and `scheduler` of a DeepSpeed configuration, as names of callables and their options, in
the form of a job."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any

from meshwright.compat.deepspeed_config import schedules
from meshwright.errors import InputError, did_you_mean
from meshwright.numbers.limits import is_number

# Optimizers of torch that need nothing but parameters, gradients and options.
_TORCH_OPTIMIZERS = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"),
    "SGD",
)
_REFUSED = {
    "lamb": "torch has no Lamb",
    "lion": "torch has no Lion",
    "muon": "DeepSpeed's Muon divides the parameters in two kinds, which torch's does not",
    **dict.fromkeys(("onebitadam", "zerooneadam", "onebitlamb"), "gradients are not compressed to one bit"),
    **dict.fromkeys(("muadam", "muadamw", "musgd"), "it needs the package mup: give initialize(optimizer=…)"),
}
# FusedAdam's defaults, where they differ from those of torch.optim.AdamW.
_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
_TORCH_SCHEDULERS = (
    *("StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "CosineAnnealingLR", "PolynomialLR"),
    *("CyclicLR", "OneCycleLR", "CosineAnnealingWarmRestarts"),
)


@dataclass(frozen=True)
class OptimizerSection:
    """`call` is the import path of the optimizer, and `options` its options. Those in `auto` are left to the job or the
    script. `is_adam`: DeepSpeed would use its own Adam, whose weight decay is that of AdamW."""

    name: str
    call: str
    options: dict[str, Any] = field(default_factory=dict)
    auto: tuple[str, ...] = ()
    is_adam: bool = False


@dataclass(frozen=True)
class SchedulerSection:
    """`call` is the import path of the schedule, and `options` its options. Those in `auto` follow from the job."""

    name: str
    call: str
    options: dict[str, Any] = field(default_factory=dict)
    auto: tuple[str, ...] = ()


def read_optimizer(raw: Any, source: str) -> OptimizerSection | None:
    """Reads the section; None if there is none."""
    name, options, auto = _type_and_params(raw, "optimizer", source)
    if name is None:
        return None
    if name.lower() in _REFUSED:
        known = ", ".join(_TORCH_OPTIMIZERS)
        raise InputError(
            f"{source}: optimizer.type {name} is not offered, because {_REFUSED[name.lower()]}: choose one of {known}"
        )
    if "max_grad_norm" in options:
        raise InputError(
            f"{source}: optimizer.params.max_grad_norm is no option of an optimizer: write gradient_clipping:"
            f" {options['max_grad_norm']} outside of the section"
        )
    if name.lower() in ("adam", "adamw"):
        return _adam(name, options, auto, source)
    known_name = next((known for known in _TORCH_OPTIMIZERS if known.lower() == name.lower()), None)
    if known_name is None:
        raise InputError(f"{source}: optimizer.type is {name}{did_you_mean(name, _TORCH_OPTIMIZERS)}")
    return OptimizerSection(known_name, f"torch.optim:{known_name}", options, auto)


def _adam(name: str, options: dict[str, Any], auto: tuple[str, ...], source: str) -> OptimizerSection:
    """Adam of DeepSpeed: `Adam` has the weight decay of AdamW, too, unless `adam_w_mode` is false."""
    torch_adam, decoupled = options.pop("torch_adam", False), options.pop("adam_w_mode", True)
    for option, flag in (("torch_adam", torch_adam), ("adam_w_mode", decoupled)):
        if not isinstance(flag, bool):
            raise InputError(f"{source}: optimizer.params.{option} is {flag!r:.80}: write true or false")
    for option, only in (("bias_correction", True), ("amsgrad", False), ("fp32_optimizer_states", True)):
        if options.pop(option, only) != only and not (option == "amsgrad" and torch_adam):
            raise InputError(f"{source}: optimizer.params.{option} is {not only}, which is not offered: leave it out")
    for option in ("freeze_step", "cuda_aware", "comm_backend_name", "set_grad_none"):
        options.pop(option, None)
    kind = "AdamW" if decoupled or name.lower() == "adamw" else "Adam"
    for option in ("lr", "eps", "weight_decay"):
        value = options.get(option, 0.0)
        if not is_number(value) or value < 0:
            raise InputError(f"{source}: optimizer.params.{option} is {value!r:.80}: write a number from 0 on")
    if "betas" in options:
        options["betas"] = _betas(options["betas"], source)
    defaults = {} if torch_adam else {option: value for option, value in _ADAM.items() if option not in auto}
    return OptimizerSection(name, f"torch.optim:{kind}", {**defaults, **options}, auto, is_adam=not torch_adam)


def _betas(value: Any, source: str) -> tuple[float, float]:
    if isinstance(value, list | tuple) and len(value) == 2 and all(is_number(beta) and 0 <= beta < 1 for beta in value):
        return value[0], value[1]
    raise InputError(f"{source}: optimizer.params.betas is {value!r:.80}: write two numbers from 0 to below 1")


def read_scheduler(raw: Any, source: str) -> SchedulerSection | None:
    """Reads the section; None if there is none."""
    name, options, auto = _type_and_params(raw, "scheduler", source)
    if name is None:
        return None
    known = (*schedules.VALID_LR_SCHEDULES, *_TORCH_SCHEDULERS)
    if name not in known:
        raise InputError(f"{source}: scheduler.type is {name}{did_you_mean(name, known)}")
    is_torch = name in _TORCH_SCHEDULERS
    if not is_torch:
        _check_options(name, options, auto, source)
    module = "torch.optim.lr_scheduler" if is_torch else "meshwright.compat.deepspeed_config.schedules"
    return SchedulerSection(name, f"{module}:{name}", options, auto)


def _check_options(name: str, options: Mapping[str, Any], auto: tuple[str, ...], source: str) -> None:
    """Raises an `InputError` about options that a schedule of DeepSpeed does not have or needs, or of a wrong type."""
    parameters = dict(signature(getattr(schedules, name)).parameters)
    del parameters["optimizer"]
    for option, value in options.items():
        if option not in parameters:
            nearest = did_you_mean(str(option), parameters)
            raise InputError(f"{source}: scheduler.params has no option {option} for {name}{nearest}")
        kind = parameters[option].annotation
        if value is None and parameters[option].default is None:
            continue
        if kind is bool and not isinstance(value, bool):
            raise InputError(f"{source}: scheduler.params.{option} is {value!r:.80}: write true or false")
        if kind is int and (not isinstance(value, int) or isinstance(value, bool)):
            raise InputError(f"{source}: scheduler.params.{option} is {value!r:.80}: write a whole number")
        numbers = value if isinstance(value, list | tuple) and kind is not float else [value]
        if kind not in (bool, str) and not all(map(is_number, numbers)):
            raise InputError(f"{source}: scheduler.params.{option} is {value!r:.80}: write a number")
    missing = [key for key, value in parameters.items() if value.default is Parameter.empty]
    missing = [key for key in missing if key not in options and key not in auto]
    if missing:
        raise InputError(f"{source}: scheduler.params of {name} needs {' and '.join(missing)}: write a number for each")


def _check_finite(params: Mapping[str, Any], section: str, source: str) -> None:
    for option, value in params.items():
        for number in value if isinstance(value, list | tuple) else [value]:
            if is_number(number) and not abs(number) <= sys.float_info.max:
                raise InputError(f"{source}: {section}.params.{option} is {value!r:.80}: write a finite number")


def _type_and_params(raw: Any, section: str, source: str) -> tuple[str | None, dict[str, Any], tuple[str, ...]]:
    """The type, the options without those that are `auto`, and the names of the latter."""
    if raw is None or raw == "auto":
        return None, {}, ()
    if not isinstance(raw, Mapping):
        raise InputError(f"{source}: {section} is {raw!r:.80}: write a JSON object with type and params")
    name, params = raw.get("type"), raw.get("params") or {}
    if name is None and not params:
        return None, {}, ()
    if not isinstance(name, str) or not isinstance(params, Mapping):
        raise InputError(f"{source}: {section} needs a type, which is a name, and params, which are a JSON object")
    _check_finite(params, section, source)
    auto = tuple(option for option, value in params.items() if value == "auto")
    return name, {option: value for option, value in params.items() if value != "auto"}, auto
