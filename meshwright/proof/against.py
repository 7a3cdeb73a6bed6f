"""Two recorded runs held against each other, `meshwright prove --against A B`: A is what B should be.

Both ran in their own precision, so what rounding may do is more than in a proof. Beside (1) to (4) of `tolerance`, for
runs whose products are rounded to a shorter type than fp32:

    one rounding per layer and direction, each by eps of that type, none knowing of the others:
        + λ · √(2 · depth) · eps                                                              → `Allowed`
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from meshwright.data.mapped import division_of
from meshwright.errors import InputError
from meshwright.job import Job, load_job, load_plan
from meshwright.plan import Plan
from meshwright.proof.causes.diagnose import diagnose
from meshwright.proof.causes.evidence import Evidence, Expected
from meshwright.proof.compare.errors import drift_of
from meshwright.proof.compare.step_comparator import Comparing, kept_by_clipping, norm_of
from meshwright.proof.compare.tolerance import LAMBDA, Shadow, Sizes, counted
from meshwright.proof.proof import Proof
from meshwright.proof.question import Question
from meshwright.proof.reference.experiments import Laboratory
from meshwright.proof.reference.groups import grouping
from meshwright.proof.reference.reference import Reference, Trained, generators_kept
from meshwright.proof.reference.setting import set_up
from meshwright.train.output.folder import RunFolder, differences
from meshwright.train.output.recording import Recorded, read, read_start, recorded_steps

# What products are rounded to. tf32 has the mantissa of fp16.
_ROUNDED = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float16, "fp8": torch.float8_e4m3fn}
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Run:
    folder: RunFolder
    job: Job
    plan: Plan
    steps: int

    @property
    def record(self) -> Path:
        return self.folder.record

    @property
    def rounded(self) -> list[torch.dtype]:
        words = (self.plan.numerics.precision, self.plan.gradients.precision)
        return [_ROUNDED[word] for word in words if word in _ROUNDED]


@dataclass(frozen=True)
class Allowed:
    sizes: Sizes
    rounded: torch.dtype | None

    def after(self, drift: float) -> float:
        return self.sizes.after(drift) + self._rounding

    @property
    def _rounding(self) -> float:
        return 0.0 if self.rounded is None else LAMBDA * math.sqrt(2 * self.sizes.depth) * torch.finfo(self.rounded).eps

    def __str__(self) -> str:
        if self.rounded is None:
            return str(self.sizes)
        return f"{self.sizes} + {LAMBDA:g} × √(2 × {self.sizes.depth} layers) × {torch.finfo(self.rounded).eps:.2g}"


def against(one: Path, other: Path) -> Proof:
    """Whether the second run's recorded steps are the first one's; if not, where they first differ and why."""
    a, b = _open(one), _open(other)
    _check(a, b)
    with generators_kept(_CPU):
        return _Comparison(a, b).run()


class _Comparison:
    """The first run's gradients are given to an optimizer again: how far that carries what rounding may do to them is
    how far the second one's weights may be off."""

    def __init__(self, a: Run, b: Run) -> None:
        self.a, self.b = a, b
        # Runs drop out; the laboratory divides a batch as the second one did.
        self.question = Question(a.job, b.plan, min(a.steps, b.steps), "fp32", dropout=True)
        self.again = Trained(set_up(self.question), _CPU)
        self.shadow = Shadow(set_up(self.question), _CPU)
        self.setting = self.again.setting
        self.allowed = Allowed(self._sizes(), _shortest([*a.rounded, *b.rounded]))
        self.comparing = Comparing(self.again.model)
        self.drift = 0.0

    def run(self) -> Proof:
        before, start = read_start(self.a.record), read_start(self.b.record)
        self.comparing.within(self.allowed.after(0.0))
        self.comparing.states(0, start, before.state, {})
        for trained in (self.again, self.shadow):
            trained.model.load_state_dict(before.state, strict=False)
        evidence = None
        for step in range(1, self.question.steps + 1):
            evidence, before = self._step(step, before)
            if evidence:
                break
        seen = self.comparing.seen
        if evidence:
            seen = replace(seen, first=diagnose(evidence))
        return Proof(
            plan=self.b.plan,
            ranks=self.b.plan.world_size,
            device=start.seen[0].device,
            steps=self.question.steps,
            dtype=self.b.plan.numerics.precision,
            comparison=seen,
            derived=str(self.allowed),
            notes=_notes(self.a, self.b, self.question.steps, seen.first.step if seen.first else None),
            against=str(self.a.folder.path),
        )

    def _step(self, step: int, before: Recorded) -> tuple[Evidence | None, Recorded]:
        expected, found = read(self.a.record, step, keep=True), read(self.b.record, step, keep=True)
        compare = self.comparing
        tolerance = self.allowed.after(self.drift)
        compare.within(tolerance)
        compare.loss(step, found, expected.loss)
        scales = compare.gradients(step, found, expected.gradients)
        norm = norm_of(expected.gradients.values()) if expected.norm is None else expected.norm
        compare.norm(step, found, norm)
        carried = self._carried(step, expected, norm, {name: tolerance * scale for name, scale in scales.items()})
        compare.states(step, found, expected.state, carried)
        if compare.seen.first:
            return self._evidence(step, before, expected, found, norm), expected
        weights = {name: value for name, value in expected.state.items() if name in compare.weights}
        self.drift = drift_of(found.state, weights)
        return None, expected

    def _carried(self, step: int, expected: Recorded, norm: Tensor, off: dict[str, float]) -> dict[str, Tensor]:
        if not expected.gradients:  # fp16 left the step out
            return {}
        kept = kept_by_clipping(norm, self.setting.clip_norm)
        for name, parameter in self.again.model.named_parameters():
            given = expected.gradients.get(name)
            parameter.grad = None if given is None else given.to(parameter) * kept
        self.shadow.follow(self.again.model, {name: kept * much for name, much in off.items()})
        last = self._last_of_epoch(step)
        self.again.update(last)
        self.shadow.update(last)
        return self.shadow.carried(self.again.model)

    def _evidence(
        self, step: int, before: Recorded, expected: Recorded, found: Recorded, norm: Tensor
    ) -> Evidence | None:
        assert self.comparing.seen.first is not None
        return Evidence(
            plan=self.b.plan,
            first=self.comparing.seen.first,
            step=step,
            tolerance=self.comparing.seen.tolerance,
            clip_norm=self.setting.clip_norm,
            found=found,
            expected=Expected(expected.loss, norm, expected.gradients, before.state, expected.state),
            lab=Laboratory(self.question, _CPU, step, before.state),
            dtype=self.allowed.rounded or self.setting.dtype,
            reference=self.a.plan,
            reference_seen=expected.seen,
        )

    def _last_of_epoch(self, step: int) -> bool:
        data = self.setting.data
        if not hasattr(data, "__len__"):
            return False
        setting, ranks = self.setting, self.question.plan.data_ranks
        division = division_of(len(data), setting.global_batch, ranks, setting.loading, drop_last=setting.drop_last)
        return step % division.batches == 0

    def _sizes(self) -> Sizes:
        """Counted while one device computes the first batch."""
        setting = set_up(self.question)
        kind = grouping(setting.model.train(), self.question.plan, self.question.dropout, setting.loss)
        reference = Reference(setting, self.question, kind, _CPU)
        batch = reference.next_batch()
        with counted(reference.model) as count:
            reference.compute(batch)
        return count.sizes(len(batch.groups), setting.dtype)


def _open(path: Path) -> Run:
    folder = RunFolder(path)
    for part in (folder.job, folder.plan):
        if not part.exists():
            raise InputError(f"--against {path}: this is no run folder, it has no {part.name}")
    steps = recorded_steps(folder.record)
    if not steps:
        raise InputError(f"--against {path}: no steps of this run were recorded, train it with --record 3")
    return Run(folder, load_job(folder.job), load_plan(folder.plan), steps)


def _check(a: Run, b: Run) -> None:
    changed = differences(b.job, a.folder)
    if changed:
        told = f"--against {a.folder.path} {b.folder.path}: the second trains something else: {changed[0]}"
        raise InputError(f"{told} (there: the first, here: the second)")
    one, other = (read_start(run.record).state for run in (a, b))
    for name in (*one, *other):
        shapes = [tuple(state[name].shape) if name in state else None for state in (one, other)]
        if shapes[0] != shapes[1]:
            first, second = a.folder.path, b.folder.path
            raise InputError(f"the models differ: {name} is {shapes[0]} in {first} and {shapes[1]} in {second}")


def _shortest(found: list[torch.dtype]) -> torch.dtype | None:
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=None)


def _notes(a: Run, b: Run, steps: int, first: int | None) -> tuple[str, ...]:
    notes = [f"{a.folder.path} ran {a.plan.summary()}, {b.folder.path} {b.plan.summary()}"]
    if a.steps != b.steps:
        notes.append(f"{a.steps} and {b.steps} steps were recorded: the first {steps} are compared")
    if first is not None and first < steps:
        notes.append(f"nothing was compared after step {first}, where the first difference is")
    return tuple(notes)
