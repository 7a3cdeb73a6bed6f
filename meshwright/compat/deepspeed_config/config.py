"""`DeepSpeedConfig`: a configuration of DeepSpeed as frozen values, read from a JSON file or a dict. `read_config`
reads it and checks every key; `warn_about_keys` lists what has no effect."""

import base64
import binascii
import json
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from meshwright.compat.deepspeed_config.batch import BatchSizes
from meshwright.compat.deepspeed_config.keys import CheckedKeys, check_keys
from meshwright.compat.deepspeed_config.sections import (
    OptimizerSection,
    SchedulerSection,
    read_optimizer,
    read_scheduler,
)
from meshwright.errors import InputError
from meshwright.numbers.limits import is_number

Offload = Literal["none", "optimizer", "parameters"]
Precision = Literal["fp32", "bf16", "fp16"]
_DTYPES: dict[str, Precision] = {
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
}
CLIPPING = 1.0  # DeepSpeed's value if a configuration has none
_MOST_STAGES = 3
_HIGHEST_SCALE_POWER = 127.0  # larger powers of 2 are infinite in fp32


@dataclass(frozen=True)
class Zero:
    """How ranks divide the model. `shard_size` is the number of ranks that divide it (MiCS); None means all."""

    stage: int = 0
    offload: Offload = "none"
    shard_size: int | None = None


@dataclass(frozen=True)
class LossScaling:
    """The loss scale of fp16. `fixed` is None for a scale that is adapted. It starts with `start`, is doubled after
    `window` steps without overflow, and halved, down to `lowest`, at every `hysteresis`-th overflow."""

    fixed: float | None = None
    start: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    lowest: float = 1.0


@dataclass(frozen=True)
class DeepSpeedConfig:
    """What a configuration says. `autocast`: operators round their inputs (`torch_autocast`), otherwise weights are
    rounded. `gradient_precision` is None if the configuration does not say in which dtype gradients are sent.
    `skips_overflow`: steps with gradients that are not finite are left out. `keys` has the keys without effect."""

    source: str
    raw: Mapping[str, Any]
    keys: CheckedKeys
    batch: BatchSizes
    zero: Zero
    precision: Precision
    autocast: bool
    loss_scaling: LossScaling
    skips_overflow: bool
    gradient_clipping: float
    gradient_precision: Precision | None
    gradient_sum: bool
    recompute: bool
    tensor: int
    optimizer: OptimizerSection | None
    scheduler: SchedulerSection | None
    managed_accumulation: bool
    drop_last: bool
    steps_per_print: int | None


def load_file(config: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns a configuration as plain data, and its name for error messages. It is a dict, the path of a JSON or HJSON
    file, or JSON in base64."""
    if isinstance(config, Mapping):
        return dict(config), "the DeepSpeed configuration"
    if not isinstance(config, str | Path):
        raise InputError(f"the DeepSpeed configuration is a {type(config).__name__}: give a path or a dict")
    file = Path(config)
    try:
        text, source = file.read_text(), str(config)
    except (OSError, UnicodeDecodeError) as error:
        decoded = _decode(str(config))
        if decoded is None:
            raise InputError(f"{config!s:.200}: this DeepSpeed configuration cannot be read: {error}") from None
        text, source = decoded, "the DeepSpeed configuration"
    raw = _parse(text, source)
    if not isinstance(raw, dict):
        raise InputError(f"{source}: a DeepSpeed configuration is a JSON object, and this is a {type(raw).__name__}")
    return raw, source


def read_config(config: str | Path | Mapping[str, Any]) -> DeepSpeedConfig:
    """Reads a configuration. Raises an `InputError` if a key or a value is wrong or asks for what is not offered."""
    raw, source = load_file(config)
    keys = check_keys(raw, source)
    if "bfloat16" in raw:
        raw = {**raw, "bf16": raw.get("bf16") or raw["bfloat16"]}
    section = _Section(raw, source, "")
    precision, autocast = _precision(section)
    zero = section.inner("zero_optimization")
    return DeepSpeedConfig(
        source=source,
        raw=raw,
        keys=keys,
        batch=BatchSizes(
            section.count("train_batch_size"),
            section.count("train_micro_batch_size_per_gpu"),
            section.count("gradient_accumulation_steps"),
        ),
        zero=_zero(zero),
        precision=precision,
        autocast=autocast,
        loss_scaling=_loss_scaling(section.inner("fp16")),
        skips_overflow=precision == "bf16" and not autocast and section.inner("bf16").flag("check_grad_overflow", True),
        gradient_clipping=section.number("gradient_clipping", CLIPPING),
        gradient_precision=section.dtype("communication_data_type"),
        gradient_sum=_gradient_sum(section, zero),
        recompute=_recompute(section.inner("activation_checkpointing")),
        tensor=_tensor(section.inner("tensor_parallel")),
        optimizer=read_optimizer(raw.get("optimizer"), source),
        scheduler=read_scheduler(raw.get("scheduler"), source),
        managed_accumulation=section.flag("managed_gradient_accumulation", True),
        drop_last=section.flag("dataloader_drop_last", False),
        steps_per_print=section.count("steps_per_print"),
    )


def warn_about_keys(config: DeepSpeedConfig, stacklevel: int = 2) -> None:
    """Lists the keys that have no effect in one warning, and unknown keys with the nearest known ones."""
    lines = []
    if config.keys.ignored:
        reasons = "; ".join(f"{name} ({text})" for name, text in config.keys.ignored.items())
        lines.append(f"these keys have no effect: {reasons}")
    if config.keys.unknown:
        names = ", ".join(f"'{name}'{nearest}" for name, nearest in config.keys.unknown.items())
        lines.append(f"DeepSpeed has no such keys: {names}")
    if lines:
        warnings.warn(f"meshwright: {config.source}: {'. '.join(lines)}", stacklevel=stacklevel + 1)


class _Section:
    """Reads values of a section, in which `auto` counts as missing. `path` begins the names in error messages."""

    def __init__(self, raw: Mapping[str, Any], source: str, path: str) -> None:
        self._raw, self.source, self.path = raw, source, path

    def value(self, key: str, default: Any = None) -> Any:
        value = self._raw.get(key, default)
        return default if value == "auto" or value is None else value

    def inner(self, key: str) -> "_Section":
        value = self.value(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, value, "write a JSON object")
        return _Section(value, self.source, f"{self.path}{key}.")

    def flag(self, key: str, default: bool) -> bool:
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "write true or false")
        return value

    def count(self, key: str, default: int | None = None) -> int | None:
        value = self.value(key, default)
        if value is not None and (not _is_whole(value) or value < 1):
            raise self.error(key, value, "write a whole number above 0")
        return None if value is None else int(value)

    def number(self, key: str, default: float, highest: float = sys.float_info.max) -> float:
        value = self.value(key, default)
        if not is_number(value) or not 0 <= value <= highest:
            raise self.error(key, value, f"write a number from 0 to {highest:.3g}")
        return float(value)

    def dtype(self, key: str) -> Precision | None:
        value = self.value(key)
        if value is not None and str(value).lower() not in _DTYPES:
            raise self.error(key, value, "write fp32, bf16 or fp16")
        return None if value is None else _DTYPES[str(value).lower()]

    def error(self, key: str, value: Any, advice: str) -> InputError:
        return InputError(f"{self.source}: {self.path}{key} is {value!r:.80}: {advice}")


def _precision(section: _Section) -> tuple[Precision, bool]:
    """The precision, and whether operators round their inputs."""
    chosen: dict[str, tuple[Precision, bool]] = {}
    half: tuple[Precision, Precision] = ("fp16", "bf16")
    for key in half:
        if section.inner(key).flag("enabled", False):
            chosen[key] = (key, False)
    autocast = section.inner("torch_autocast")
    if autocast.flag("enabled", False):
        chosen["torch_autocast"] = (autocast.dtype("dtype") or "bf16", True)
    if len(chosen) > 1:
        raise InputError(f"{section.source}: {' and '.join(chosen)} are both enabled: enable one of them")
    return next(iter(chosen.values()), ("fp32", False))


def _zero(zero: _Section) -> Zero:
    stage = zero.value("stage", 0)
    if not is_number(stage) or stage not in range(_MOST_STAGES + 1):
        raise zero.error("stage", stage, "write 0, 1, 2 or 3")
    offload: Offload = "none"
    if _is_offloaded(zero, "offload_optimizer", "cpu_offload"):
        offload = "optimizer"
    if _is_offloaded(zero, "offload_param", "cpu_offload_param") and stage == _MOST_STAGES:
        offload = "parameters"
    size = zero.value("mics_shard_size", -1)
    if not _is_whole(size) or (size < 1 and size != -1):
        raise zero.error("mics_shard_size", size, "write a whole number of ranks")
    return Zero(int(stage), offload if stage else "none", int(size) if size > 0 else None)


def _is_offloaded(zero: _Section, key: str, old_key: str) -> bool:
    section = zero.inner(key)
    device = section.value("device", "none")
    if device not in ("none", "cpu"):
        raise section.error("device", device, "only the memory of the CPU is offered: write cpu")
    return device == "cpu" or zero.flag(old_key, False)


def _loss_scaling(fp16: _Section) -> LossScaling:
    fixed = fp16.number("loss_scale", 0.0)
    return LossScaling(
        fixed=fixed or None,
        start=2.0 ** fp16.number("initial_scale_power", 16, _HIGHEST_SCALE_POWER),
        window=fp16.count("loss_scale_window", 1000) or 1000,
        hysteresis=fp16.count("hysteresis", 2) or 2,
        consecutive_hysteresis=fp16.flag("consecutive_hysteresis", False),
        lowest=fp16.number("min_loss_scale", 1.0) or 1.0,
    )


def _gradient_sum(section: _Section, zero: _Section) -> bool:
    operation = section.value("gradient_allreduce_op", "mean")
    if str(operation).lower() not in ("mean", "sum"):
        raise section.error("gradient_allreduce_op", operation, "write mean or sum")
    is_sum = str(operation).lower() == "sum"
    if is_sum and zero.value("stage", 0) == _MOST_STAGES:
        raise section.error("gradient_allreduce_op", operation, "DeepSpeed does not have it with ZeRO stage 3")
    return is_sum


def _recompute(section: _Section) -> bool:
    partitions, offloads = section.flag("partition_activations", False), section.flag("cpu_checkpointing", False)
    return partitions or offloads or section.count("number_checkpoints") is not None


def _tensor(section: _Section) -> int:
    inner = [section.inner(key).count("tp_size", 1) for key in ("tp", "tensor_parallel")]
    size = section.value("autotp_size", 0)
    if not _is_whole(size) or size < 0:
        raise section.error("autotp_size", size, "write a whole number of ranks")
    return max(1, int(size), *(size or 1 for size in inner))


def _is_whole(value: Any) -> bool:
    """Whether a value is a whole number, also one such as 2.0; neither NaN nor infinity is one."""
    return is_number(value) and (isinstance(value, int) or value.is_integer())


def _decode(text: str) -> str | None:
    """The text that a base64 text stands for; None if it is none."""
    try:
        return base64.urlsafe_b64decode(text).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None


def _parse(text: str, source: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _without_duplicates(pairs, source))
    except RecursionError:
        raise InputError(f"{source}: this JSON is nested too deeply to be a DeepSpeed configuration") from None
    except json.JSONDecodeError as error:
        if find_spec("hjson") is None:
            raise InputError(f"{source}: this is no JSON: {error} (for HJSON: pip install hjson)") from None
    hjson = import_module("hjson")
    try:
        return hjson.loads(text, object_pairs_hook=lambda pairs: _without_duplicates(pairs, source))
    except ValueError as error:
        raise InputError(f"{source}: this is no JSON: {error}") from None


def _without_duplicates(pairs: list[tuple[str, Any]], source: str) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{source}: the key '{twice}' is there twice")
    return values
