"""The profile of a model whose shapes depend on its data, from real steps on the device it lies on.

A step is recorded with the sample's own number of samples and, where the sample can be halved, with half of them.
What is equal in both does not grow with the batch; what differs grows on the line through both; and what one of them
did more often than the other (a loop over samples, an expert that nobody was sent to) grows in proportion.
"""

import copy
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.blocks.recompute import Recompute, find_blocks
from meshwright.call import complaint
from meshwright.errors import InputError
from meshwright.profile.fake import bytes_in
from meshwright.profile.tracing.real import RealRules, device_of, is_real, real_batch, same_chance, samples_in
from meshwright.profile.tracing.record import OperatorSeen, Recording, record_step
from meshwright.profile.tracing.step import LossFunction, loss_of
from meshwright.profile.tracing.trace import parameters_of, profile
from meshwright.profile.values import Change, Growth, ModelProfile, Operator, Phase, Role, Stretch

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NOWHERE = "it lies on no device, so no real step can be measured"


def profile_or_measure(
    model: nn.Module,
    sample: Any,
    loss: LossFunction | None,
    *,
    precision: str = "fp32",
    on_gpu: bool = True,
    target: str | None = None,
    recompute: Recompute = "none",
    structured: bool = False,
) -> tuple[ModelProfile, str]:
    """The profile, traced or else measured (then without the structure), and in words which of the two."""
    try:
        found = profile(
            model,
            sample,
            loss,
            precision=precision,
            on_gpu=on_gpu,
            target=target,
            recompute=recompute,
            structured=structured,
        )
    except InputError as error:
        if not is_real(model, sample):
            raise InputError(f"{error}, and {_NOWHERE}") from error
        try:
            found = measured_profile(
                model, sample, loss, precision=precision, on_gpu=on_gpu, target=target, recompute=recompute
            )
        except InputError:
            raise error from None  # it names the module, and a batch that does not fit fails in both
        return found, f"measured steps at {_batches(found)}"
    return found, f"traced steps at {_batches(found)}"


def _batches(found: ModelProfile) -> str:
    *others, largest = found.traced_batches
    return f"batches {', '.join(str(size) for size in others)} and {largest}" if others else f"batch {largest}"


def measured_profile(
    model: nn.Module,
    sample: Any,
    loss: LossFunction | None,
    *,
    precision: str = "fp32",
    on_gpu: bool = True,
    target: str | None = None,
    recompute: Recompute = "none",
) -> ModelProfile:
    """Runs a copy of the model: it and the random numbers to come are left as they are. On a CPU, `on_gpu` asks for
    the attention and the types that a GPU would use; its fused RMS norm has no counterpart."""
    if not is_real(model, sample):
        raise InputError(f"the model cannot be measured: {_NOWHERE}")
    size = samples_in(sample)
    sizes = (size // 2, size) if size > 1 else (size,)
    batches = [real_batch(sample, number, device_of(model)) for number in sizes]
    recordings = [_record(model, batch, loss, precision, on_gpu, target, recompute) for batch in batches]
    half = _Half(size // 2, recordings[0]) if size > 1 else None
    return ModelProfile(
        precision=precision,
        parameters=parameters_of(model),
        buffer_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
        input_bytes=_growth(bytes_in(batches[-1]), size, bytes_in(batches[0]), half),
        stretches=_stretches(recordings[-1], size, half),
        traced_batches=sizes,
        recompute=recompute,
        blocks=find_blocks(model),
    )


# ---- one real step


def _record(
    model: nn.Module,
    batch: Any,
    loss: LossFunction | None,
    precision: str,
    on_gpu: bool,
    target: str | None,
    recompute: Recompute,
) -> Recording:
    device = device_of(model)
    twin = copy.deepcopy(model)
    names = {module: name for name, module in twin.named_modules()}
    own_loss = copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss  # it may count and learn, too
    rules = RealRules() if on_gpu and device.type == "cpu" else nullcontext()
    on_device = _OnDevice(twin, device, precision)

    def run(_: nn.Module) -> Tensor:
        return loss_of(on_device, batch, own_loss, "fp32", target)

    try:
        with same_chance(device), torch.enable_grad(), rules:
            return record_step(twin, run, batch, names, recompute=recompute)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"a real step of the model fails: {complaint(error)}") from error


class _OnDevice(nn.Module):
    """The model in the plan's precision, lowered as its own device does it."""

    def __init__(self, model: nn.Module, device: torch.device, precision: str) -> None:
        super().__init__()
        self.model, self.device, self.dtype = model, device, _AUTOCAST.get(precision)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None):
            return self.model(*args, **kwargs)


# ---- one or two recordings become a profile

_Key = tuple[Phase, str, str]  # pass, module, operator


@dataclass(frozen=True)
class _Half:
    size: int
    recording: Recording


def _growth(value: float, size: int, at_half: float | None, half: _Half | None) -> Growth:
    """Exact at `size`. A line that says less than nothing for small batches is chance: then it is in proportion."""
    if half is None or at_half is None:
        return Growth(0, value / size)
    slope = (value - at_half) / (size - half.size)
    constant = value - slope * size
    return Growth(constant, slope) if slope >= 0 and constant >= 0 else Growth(0, value / size)


def _stretches(recording: Recording, size: int, half: _Half | None) -> tuple[Stretch, ...]:
    turn = _turn(recording)
    partners = _partners(_keys(recording), _keys(half.recording) if half else [])
    operators = [
        _operator(seen, size, half.recording.operators[partner] if half and partner is not None else None, half)
        for seen, partner in zip(recording.operators, partners, strict=True)
    ]
    changes = _changes(recording, size, half)
    early = [change for change in changes if change.operator <= turn]
    late = [replace(change, operator=change.operator - turn) for change in changes if change.operator > turn]
    return (
        Stretch("", "forward", (), tuple(operators[:turn]), tuple(early)),
        Stretch("", "backward", (), tuple(operators[turn:]), tuple(late)),
    )


def _turn(recording: Recording) -> int:
    return next(operators for operators, word in recording.marks if word == "backward")


def _keys(recording: Recording) -> list[_Key]:
    turn = _turn(recording)
    return [
        ("forward" if number < turn else "backward", seen.place.layer, seen.name)
        for number, seen in enumerate(recording.operators)
    ]


def _partners(keys: list[Any], others: list[Any]) -> list[int | None]:
    """Of each of `keys`, the place of the same one in `others`; None where there are more or fewer of its kind."""
    counts, other_counts = Counter(keys), Counter(others)
    turns: Counter[Any] = Counter()
    places = {}
    for place, key in enumerate(others):
        places[key, turns[key]] = place
        turns[key] += 1
    numbers = {key: count() for key in counts}
    return [places[key, next(numbers[key])] if counts[key] == other_counts[key] else None for key in keys]


def _operator(seen: OperatorSeen, size: int, other: OperatorSeen | None, half: _Half | None) -> Operator:
    shape = other.shape if other and len(other.shape) == len(seen.shape) else (None,) * len(seen.shape)
    return Operator(
        layer=seen.place.layer,
        name=seen.name,
        kind=seen.kind,
        dtype=seen.dtype,
        flops=_growth(seen.flops, size, other.flops if other else None, half),
        bytes=_growth(seen.bytes, size, other.bytes if other else None, half),
        shape=tuple(_growth(mine, size, its, half) for mine, its in zip(seen.shape, shape, strict=True)),
        workspace=_growth(seen.workspace, size, other.workspace if other else None, half),
        gradient=seen.place.gradient,
    )


def _changes(recording: Recording, size: int, half: _Half | None) -> list[Change]:
    takers = _takers(recording)
    other_takers = _takers(half.recording) if half else {}
    places = list(other_takers)
    partners = dict(zip(takers, _partners(list(takers.values()), list(other_takers.values())), strict=True))
    found: list[Change] = []
    grown: dict[int, Growth] = {}
    for number, seen in enumerate(recording.memory):
        taken = number if seen.taken is None else seen.taken
        if taken not in grown:
            partner = partners[taken]
            at_half = half.recording.memory[places[partner]].bytes if half and partner is not None else None
            is_gradient = taken in recording.gradients
            grown[taken] = Growth(seen.bytes, 0) if is_gradient else _growth(seen.bytes, size, at_half, half)
        role: Role = "temporary"
        if taken in recording.gradients:
            role = "gradient"
        elif taken in recording.saved:
            role = "saved"
        sign = 1 if seen.taken is None else -1
        size_now = Growth(sign * grown[taken].constant, sign * grown[taken].linear)
        found.append(Change(seen.operator, size_now, role, recording.memory[taken].place.layer))
    return found


def _takers(recording: Recording) -> dict[int, _Key]:
    """Of each entry that takes memory, the operator that took it."""
    keys: list[_Key] = [("forward", "", ""), *_keys(recording)]
    return {number: keys[seen.operator] for number, seen in enumerate(recording.memory) if seen.taken is None}
