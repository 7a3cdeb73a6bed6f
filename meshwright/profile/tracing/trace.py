"""Any model's profile, from a few steps on fake tensors: nothing is allocated, and equal blocks are traced once.

The step is traced at three batch sizes. Every quantity is a straight line through the first two that the third must
lie on; where it does not, samples are compared with each other, and it is a parabola that a fourth must lie on.
"""

import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.blocks.module_names import within
from meshwright.blocks.recompute import Recompute, find_blocks
from meshwright.errors import InputError
from meshwright.profile.fake import bytes_in, fake_batch, fake_model, one_sequence
from meshwright.profile.gpu_rules import GpuRules
from meshwright.profile.repeats import Run, find_runs, left_out, shorten
from meshwright.profile.structure.marks import Marks, find_marks
from meshwright.profile.structure.structure import structure
from meshwright.profile.tracing.record import MemorySeen, OperatorSeen, Recording, Rules, record_step
from meshwright.profile.tracing.step import LossFunction, loss_of
from meshwright.profile.values import Change, Growth, ModelProfile, Operator, Parameter, Phase, Role, Stretch

BATCHES = (2, 3, 5)
CHECK = 7


@dataclass(frozen=True)
class _Cut:
    """Operators [begin, end) of a recording, that stand for all of `blocks`."""

    unit: str
    phase: Phase
    blocks: tuple[str, ...]
    begin: int
    end: int

    @property
    def count(self) -> int:
        return len(self.blocks) or 1


def profile(
    model: nn.Module,
    sample: Any,
    loss: LossFunction | None,
    *,
    precision: str = "fp32",
    on_gpu: bool = True,
    target: str | None = None,
    recompute: Recompute = "none",
    structured: bool = False,
    repeats: bool = True,
) -> ModelProfile:
    """The profile of a model on batches like `sample`, whose leading dimension may be any. With `structured` it knows
    how the model can be split and cut, with `repeats` off every block is traced. The model may lie on the meta
    device; it is left as it is."""
    runs = find_runs(model) if repeats else ()

    def run(module: nn.Module, batch: Any) -> Tensor:
        return loss_of(module, batch, loss, precision, target)

    rules: Rules = GpuRules if on_gpu else nullcontext

    def record(size: int) -> Recording:
        with one_sequence(sample):
            return _record(model, sample, run, size, runs, recompute, rules)

    try:
        recordings = [record(size) for size in BATCHES]
        cuts = _cuts(recordings[0], runs)
    except (InputError, LookupError):
        # A model that counts its blocks itself misses those that were left out; blocks that are never called, or
        # frozen, have no place in a pass.
        if not runs:
            raise
        return profile(
            model,
            sample,
            loss,
            precision=precision,
            on_gpu=on_gpu,
            target=target,
            recompute=recompute,
            structured=structured,
            repeats=False,
        )
    marks = Marks({}, {}, {}, {})
    if structured:
        with rules(), one_sequence(sample):
            marks = find_marks(model, sample, run, BATCHES[0], runs)
    stretches = _combine(recordings, BATCHES, cuts, marks)
    found = ModelProfile(
        precision=precision,
        parameters=parameters_of(model),
        buffer_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
        input_bytes=_input_bytes(sample),
        stretches=stretches,
        traced_batches=BATCHES,
        recompute=recompute,
        blocks=find_blocks(model),
        structure=structure(model, sample, target=target, repeats=repeats) if structured else None,
    )
    if _has_squares(found):
        _check_fourth(found, record(CHECK), cuts)
    return found


def _record(
    model: nn.Module,
    sample: Any,
    run: Callable[[nn.Module, Any], Tensor],
    size: int,
    runs: tuple[Run, ...],
    recompute: Recompute,
    rules: Rules,
) -> Recording:
    mode = FakeTensorMode()
    twin = fake_model(model, mode, left_out(runs))
    names = {module: name for name, module in twin.named_modules()}
    shorten(twin, runs)
    batch = fake_batch(sample, size, mode)
    blocks = {name for run in runs for name in (run.first, run.middle, run.last)}
    try:
        with mode:
            return record_step(twin, lambda module: run(module, batch), batch, names, blocks, recompute, rules)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{_culprit(error, names)}: {str(error).splitlines()[0]}") from error


def _culprit(error: Exception, names: dict[nn.Module, str]) -> str:
    """Which module could not be traced: the innermost whose forward pass stands in the error's trace."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        module = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(module, nn.Module):
            name = names.get(module, "")
            return f"the model cannot be traced in {name or 'its forward pass'} ({type(module).__name__})"
    return "the model cannot be traced"


# ---- cutting a step into stretches


_Edge = tuple[int, tuple[str, ...]]  # where a stretch begins, and its blocks


def _cuts(recording: Recording, runs: tuple[Run, ...]) -> list[_Cut]:
    marks = {word: operators for operators, word in recording.marks}
    turn, end = marks["backward"], marks["end"]
    forward = [(marks[f"enter {run.first}"], run) for run in runs]
    edges: list[_Edge] = [(0, ())]
    for begin, run in sorted(forward, key=lambda item: item[0]):
        edges += [
            (begin, (run.first,)),
            (marks[f"enter {run.middle}"], run.blocks[1:-1]),
            (marks[f"enter {run.last}"], (run.last,)),
            (marks[f"leave {run.last}"], ()),
        ]
    cuts = _between(edges, turn, "forward")
    back: list[_Edge] = [(turn, ())]
    for _, run in sorted(forward, key=lambda item: -item[0]):
        back += [
            (_first_of(recording, run.last, turn), (run.last,)),
            (_first_of(recording, run.middle, turn), run.blocks[1:-1]),
            (_first_of(recording, run.first, turn), (run.first,)),
            (_last_of(recording, run.first, turn) + 1, ()),
        ]
    return cuts + _between(back, end, "backward")


def _between(edges: list[_Edge], end: int, phase: Phase) -> list[_Cut]:
    closed = [*edges, (end, ())]
    return [
        _Cut(blocks[0] if blocks else "", phase, blocks, begin, after)
        for (begin, blocks), (after, _) in pairwise(closed)
    ]


def _first_of(recording: Recording, block: str, turn: int) -> int:
    return _backward_of(recording, block, turn)[0]


def _last_of(recording: Recording, block: str, turn: int) -> int:
    return _backward_of(recording, block, turn)[-1]


def _backward_of(recording: Recording, block: str, turn: int) -> list[int]:
    operators = recording.operators
    return [number for number in range(turn, len(operators)) if within(operators[number].place.layer, block)]


# ---- three recordings become one profile


def _combine(
    recordings: list[Recording], sizes: tuple[int, ...], cuts: list[_Cut], marks: Marks
) -> tuple[Stretch, ...]:
    first = recordings[0]
    for other in recordings[1:]:
        same = [o.name for o in other.operators] == [o.name for o in first.operators]
        if not same or len(other.memory) != len(first.memory):
            raise InputError(
                "the model runs other operators for other batch sizes: its cost cannot be told from small batches"
            )
    operators = [
        _operator([recording.operators[n] for recording in recordings], sizes, marks)
        for n in range(len(first.operators))
    ]
    changes = [
        _change(first, n, [r.memory[n].bytes for r in recordings], sizes, marks) for n in range(len(first.memory))
    ]
    homes = [next(cut for cut in cuts if _holds(cut, seen)) for seen in first.memory]
    inside: dict[_Cut, list[Change]] = {cut: [] for cut in cuts}
    for number, (change, home) in enumerate(zip(changes, homes, strict=True)):
        taken = first.memory[number].taken
        # What all blocks took and dies outside of them (a cache of weights, say) dies as often as it was taken.
        outside = not home.unit and taken is not None
        count = homes[taken].count if outside and taken is not None else 1
        place = change.operator - home.begin
        inside[home].append(replace(change, operator=place, times=count))
    return tuple(
        Stretch(cut.unit, cut.phase, cut.blocks, tuple(operators[cut.begin : cut.end]), tuple(inside[cut]))
        for cut in cuts
    )


def _holds(cut: _Cut, seen: MemorySeen) -> bool:
    """An operator's own memory is noted behind it, and what dies before the next one belongs to it too."""
    return cut.begin < seen.operator <= cut.end or (seen.operator == 0 and cut.begin == 0)


def _operator(seen: list[OperatorSeen], sizes: tuple[int, ...], marks: Marks) -> Operator:
    first = seen[0]
    return Operator(
        layer=first.place.layer,
        name=first.name,
        kind=first.kind,
        dtype=first.dtype,
        flops=fit([o.flops for o in seen], sizes),
        bytes=fit([o.bytes for o in seen], sizes),
        shape=tuple(fit(list(values), sizes) for values in zip(*(o.shape for o in seen), strict=True)),
        split=marks.operators.get(first.place.forward, ""),
        workspace=fit([o.workspace for o in seen], sizes),
        gradient=first.place.gradient,
    )


def _change(recording: Recording, number: int, sizes_seen: list[int], sizes: tuple[int, ...], marks: Marks) -> Change:
    seen: MemorySeen = recording.memory[number]
    taken = number if seen.taken is None else seen.taken
    role: Role = "temporary"
    if taken in recording.gradients:
        role = "gradient"
    elif taken in recording.saved:
        role = "saved"
    place = recording.memory[taken].place
    if role == "gradient":
        split = marks.parameters.get(recording.gradients[taken], "")
    else:
        split = (marks.given if place.gradient else marks.results).get(place.forward, "")
    return Change(seen.operator, fit(sizes_seen, sizes), role, place.layer, split=split)


def fit(values: list[int], sizes: tuple[int, ...]) -> Growth:
    """The line through the first two points where the third lies on it, else the parabola through all three."""
    (a, b, c), (x, y, z) = values[:3], sizes[:3]
    slope, next_slope = (b - a) / (y - x), (c - b) / (z - y)
    square = (next_slope - slope) / (z - x)
    if abs(square) * z * z <= 1e-9 * max(abs(a), abs(b), abs(c), 1):
        return Growth(a - slope * x, slope)
    linear = slope - square * (x + y)
    return Growth(a - (linear + square * x) * x, linear, square)


def _has_squares(found: ModelProfile) -> bool:
    return any(o.flops.square or o.bytes.square for stretch in found.stretches for o in stretch.operators)


def _check_fourth(found: ModelProfile, recording: Recording, cuts: list[_Cut]) -> None:
    for stretch, cut in zip(found.stretches, cuts, strict=True):
        for operator, seen in zip(stretch.operators, recording.operators[cut.begin : cut.end], strict=True):
            if abs(operator.bytes.at(CHECK) - seen.bytes) > 0.5:
                raise InputError(
                    f"{operator.layer or 'the model'}: the cost of {operator.name} grows with the batch in no known way"
                )


def parameters_of(model: nn.Module) -> tuple[Parameter, ...]:
    names: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    return tuple(
        Parameter(
            names=tuple(names[key]),
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            bytes=tensor.numel() * tensor.element_size(),
            trainable=tensor.requires_grad,
        )
        for key, tensor in tensors.items()
    )


def _input_bytes(sample: Any) -> Growth:
    sizes = [bytes_in(fake_batch(sample, size, FakeTensorMode())) for size in BATCHES]
    return fit(sizes, BATCHES)
