"""Which of Accelerate's options Meshwright obeys. One that would change the training and is not obeyed is refused;
one that only tunes code of Accelerate which does not run is listed in a warning.

Options are arguments of `Accelerator`, and environment variables, in which `accelerate launch` passes on its own
arguments and the file of `accelerate config`.
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from accelerate.utils import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    DynamoBackend,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)

from meshwright.errors import InputError
from meshwright.processes.environment import variables_of

_USE_A_PLAN = "give Accelerator(plan=…) a plan instead (docs/accelerate.md)"
# Arguments that choose another engine, with the field of a plan that does the same.
_ENGINES = {
    "deepspeed_plugin": "axes.shard",
    "deepspeed_plugins": "axes.shard",
    "fsdp_plugin": "axes.shard",
    "megatron_lm_plugin": "axes.shard",
    "torch_tp_plugin": "axes.shard",
    "parallelism_config": "axes.shard",
}
# Variables with the names of the options of `accelerate config` that set them.
_ENGINE_VARIABLES = {
    "USE_DEEPSPEED": "deepspeed_config",
    "USE_FSDP": "fsdp_config",
    "USE_MEGATRON_LM": "megatron_lm_config",
    "USE_PARALLELISM_CONFIG": "parallelism_config",
    "USE_SAGEMAKER": "compute_environment: AMAZON_SAGEMAKER",
}
# What Accelerate itself does with these variables is inherited.
_OBEYED_VARIABLES = {
    *("MIXED_PRECISION", "USE_CPU", "TORCH_DEVICE", "DEBUG_MODE", "DEBUG_RDV_FILE", "CPU_AFFINITY"),
    *("GRADIENT_ACCUMULATION_STEPS", "BYPASS_DEVICE_MAP", "LOG_LEVEL", "DISABLE_RICH", "ENABLE_RICH"),
}
_OBEYED_HANDLERS = (InitProcessGroupKwargs, ProfileKwargs)
# Arguments of DDP that change how it works, but not what it computes; gradients are combined in another way here.
_ONLY_FOR_DDP = ("dim", "bucket_cap_mb", "check_reduction", "gradient_as_bucket_view", "static_graph")


def check_arguments(arguments: Mapping[str, Any]) -> list[str]:
    """Raises an `InputError` if an argument of `Accelerator` asks for what Meshwright does not do. Returns the
    arguments that have no effect."""
    for name, field in _ENGINES.items():
        if arguments.get(name) is not None:
            raise InputError(f"Accelerator({name}=…) is not offered: leave it out and set {field} of a plan")
    _check_compilation(arguments.get("dynamo_backend"), arguments.get("dynamo_plugin"))
    _check_precision(arguments.get("mixed_precision"), "Accelerator(mixed_precision=…)")
    loading = arguments.get("dataloader_config")
    if loading is not None and loading.use_stateful_dataloader:
        raise InputError(
            "DataLoaderConfiguration(use_stateful_dataloader=True) is not offered: resume within an epoch with"
            " accelerator.skip_first_batches(loader, n)"
        )
    return _check_handlers(arguments.get("kwargs_handlers") or ())


def read_variables() -> dict[str, str]:
    """Returns the environment variables that begin with `ACCELERATE_`, by their names without this prefix. `accelerate
    launch` gives its options in them, and those of the file that `accelerate config` has written."""
    return {name.removeprefix("ACCELERATE_"): value for name, value in variables_of("ACCELERATE_").items()}


def check_variables(variables: Mapping[str, str]) -> list[str]:
    """Raises an `InputError` if an environment variable asks for what Meshwright does not do. Returns the variables
    that have no effect. The names are without the prefix `ACCELERATE_`."""
    for name, option in _ENGINE_VARIABLES.items():
        if _is_true(variables.get(name, "")):
            raise InputError(
                f"ACCELERATE_{name} is {variables[name]} (`{option}` of accelerate's config): {_USE_A_PLAN}"
            )
    backend = variables.get("DYNAMO_BACKEND", "NO")
    if backend.upper() != "NO":
        raise InputError(
            f"ACCELERATE_DYNAMO_BACKEND is {backend} (`dynamo_config` of accelerate's config): set it to NO and"
            " compute.compile of a plan to blocks"
        )
    _check_precision(variables.get("MIXED_PRECISION"), "ACCELERATE_MIXED_PRECISION")
    known = _OBEYED_VARIABLES | set(_ENGINE_VARIABLES)
    options_without_effect = ("DYNAMO_", "FP8_", "DEEPSPEED_", "CONFIG_DS_")  # those of an engine that is off
    return [
        f"ACCELERATE_{name}={value}"
        for name, value in sorted(variables.items())
        if name not in known and not name.startswith(options_without_effect)
        if not (name == "DOWNCAST_BF16" and not _is_true(value))
    ]


def warn_once(without_effect: Iterable[str]) -> None:
    """Lists options that have no effect in one warning, which Python shows once."""
    names = list(without_effect)
    if names:
        warnings.warn(
            f"meshwright: these options of Accelerate have no effect, because a plan decides: {', '.join(names)}",
            stacklevel=4,
        )


def _check_compilation(backend: Any, plugin: Any) -> None:
    chosen = backend if backend is not None else getattr(plugin, "backend", None)
    if chosen is not None and str(getattr(chosen, "value", chosen)).upper() != DynamoBackend.NO.value:
        raise InputError(
            f"Accelerator(dynamo_backend={str(getattr(chosen, 'value', chosen))!r}) is not offered: leave it out and"
            " set compute.compile of a plan to blocks"
        )


def _check_precision(precision: Any, source: str) -> None:
    if precision is not None and str(precision) == "fp8":
        raise InputError(f"{source} is fp8: leave it out and set numerics.precision of a plan to fp8")


def _check_handlers(handlers: Iterable[KwargsHandler]) -> list[str]:
    without_effect: list[str] = []
    for handler in handlers:
        if isinstance(handler, DistributedDataParallelKwargs):
            without_effect += _check_ddp(handler)
        elif isinstance(handler, AutocastKwargs):
            if not handler.enabled:
                raise InputError(
                    "AutocastKwargs(enabled=False) is not offered for the whole training: leave mixed_precision out,"
                    " or give the handler to accelerator.autocast(…)"
                )
            without_effect += _changed(handler, ("cache_enabled",))
        elif not isinstance(handler, (*_OBEYED_HANDLERS, GradScalerKwargs)):
            raise InputError(f"kwargs_handlers: {type(handler).__name__} is not offered: leave it out")
    return without_effect


def _check_ddp(handler: DistributedDataParallelKwargs) -> list[str]:
    """Unused parameters need no option here: they are always allowed."""
    for name in ("comm_hook", "comm_wrapper"):
        hook = getattr(handler, name)
        if getattr(hook, "value", hook) != "no":
            raise InputError(
                f"DistributedDataParallelKwargs({name}={getattr(hook, 'value', hook)!r}) is not offered: leave it out"
                " and set gradients.precision of a plan to bf16 or fp16"
            )
    if not handler.broadcast_buffers:
        raise InputError(
            "DistributedDataParallelKwargs(broadcast_buffers=False) is not offered: leave it out; all ranks get the"
            " buffers of the first after each step"
        )
    return _changed(handler, _ONLY_FOR_DDP)


def _changed(handler: KwargsHandler, names: Iterable[str]) -> list[str]:
    """The options of a handler, among these names, that are not at their defaults."""
    defaults = {field.name: field.default for field in fields(handler)}
    kind = type(handler).__name__
    return [f"{kind}({n}={getattr(handler, n)!r})" for n in names if getattr(handler, n) != defaults[n]]


def _is_true(value: str) -> bool:
    return value.lower() in ("1", "true", "yes", "y", "on", "t")
