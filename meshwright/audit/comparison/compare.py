"""`compare_records`: compares two recorded trainings, tensor by tensor, in the order in which a step computes them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.audit.causes.own_copies import own_copies
from meshwright.audit.evidence import MOST_ROWS, Compared, Difference, distinct
from meshwright.audit.recorded_run import RecordedRun
from meshwright.audit.rounding import (
    SMALLEST_ASSUMED_DRIFT,
    Rounding,
    as_rows,
    drift_factor,
    eps_of,
    perturbation,
    row_shares,
    weight_bounds,
)


@dataclass(frozen=True)
class ComparedTensor:
    """A tensor or number that was compared. `ratio` is its error divided by what rounding explains: at most 1 if both
    sides are equal. `error` is the largest difference relative to the largest value of the tensor."""

    step: int
    what: Compared
    name: str | None
    error: float
    ratio: float


@dataclass
class RecordComparison:
    """The result: every compared tensor, and by step the differences in the order in which the step computes them.
    `bounds` holds how far each element of the last compared step's gradients may differ."""

    steps: int = 0
    values: list[ComparedTensor] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    bounds: dict[str, Tensor] = field(default_factory=dict)
    not_compared: list[str] = field(default_factory=list)

    @property
    def first(self) -> Difference | None:
        """The distinct difference that was computed first."""
        if not self.differences:
            return None
        same = [other for other in self.differences if other.what == self.differences[0].what]
        return distinct(same)[0]

    @property
    def largest_error(self) -> float:
        return max((value.error for value in self.values if value.what == "gradient"), default=0.0)


def compare_records(reference: RecordedRun, candidate: RecordedRun, noise: RecordedRun | None) -> RecordComparison:
    """Compares up to the first step that differs. `noise` is the reference from weights that were changed by one
    rounding."""
    comparison = _Comparison(reference, candidate, noise)
    comparison.result.differences += own_copies(candidate)
    return comparison.run()


class _Comparison:
    def __init__(self, reference: RecordedRun, candidate: RecordedRun, noise: RecordedRun | None) -> None:
        self.reference, self.candidate, self.noise = reference, candidate, noise
        self.result = RecordComparison(steps=min(reference.steps, candidate.steps))
        self.eps = eps_of(reference.dtypes | candidate.dtypes)
        self.rounding = Rounding(self.eps)
        self.norm_share = 0.0  # by which the norm of this step may differ, and with it all clipped gradients
        self.uncertainty: dict[str, Tensor] = {}  # the largest b / |g| of each gradient so far
        self.module_scales: dict[int, dict[str, float]] = {}  # by step
        self.names = [name for name in reference.parameters if name in candidate.parameters]
        self.compared_names = set(self.names) | set(reference.buffers)

    def run(self) -> RecordComparison:
        self._compare_start()
        for step in range(1, self.result.steps + 1):
            if self.result.differences:
                break
            self._compare_step(step)
        return self.result

    def _compare_start(self) -> None:
        names = [*self.names, *self.reference.buffers]
        for name in names:
            self._compare_exactly(name)

    def _compare_exactly(self, name: str) -> None:
        expected = _wide(self.reference.whole(0, "start", name))
        if expected is not None and expected.is_floating_point():
            bounds = 2 * self._start_eps(name) * expected.abs() + 1e-30
            self._compare(0, "start", name, "start", expected, bounds, None)

    def _start_eps(self, name: str) -> float:
        """The eps of the shorter of both sides' types of one parameter: masters are compared, or cast copies."""
        entries = [run.parameters.get(name) or run.buffers.get(name) or {} for run in (self.reference, self.candidate)]
        return eps_of({entry.get("dtype", "float32") for entry in entries})

    def _compare_step(self, step: int) -> None:
        self.rounding = Rounding(self.eps, step * self._drift(step - 1))
        kinds = self.reference.gradient_kinds(self.candidate, step)
        self.result.bounds = {}
        for name in reversed(self.names):
            self._compare_gradient(step, name, kinds)
        self._compare_norms(step)
        if "unclipped" in kinds and all(
            run.tensors(step, "gradient").parts for run in (self.reference, self.candidate)
        ):
            for name in reversed(self.names):
                self._compare_tensor(step, "clipped gradient", name, "gradient", self.norm_share)
        for name in self.reference.buffers:
            self._compare_tensor(step, "buffer", name, "buffer")
        for name in self.names:
            self._compare_weight(step, name)

    # ---- gradients

    def _compare_gradient(self, step: int, name: str, kinds: tuple[str, str]) -> None:
        expected = _wide(self.reference.whole(step, kinds[0], name))
        if expected is None:
            expected = self._zeros(name) if self.candidate.parts(step, kinds[1], name) else None
            if expected is None:
                return
        noise = _wide(self.noise.whole(step, kinds[0], name)) if self.noise else None
        scale = self._module_scales(step, kinds[0]).get(_module_of(name), 0.0)
        bounds = self.rounding.element_bounds(expected, noise, scale)
        self.result.bounds[name] = bounds
        row_bounds = self.rounding.row_bounds(expected, noise, scale) if step == 1 else None
        self._compare(step, "gradient", name, kinds[1], expected, bounds, row_bounds)
        share = bounds / expected.abs().clamp(min=1e-300)
        earlier = self.uncertainty.get(name)
        self.uncertainty[name] = share if earlier is None else torch.maximum(earlier, share)

    def _zeros(self, name: str) -> Tensor | None:
        entry, sketch = self.reference.parameters[name], self.reference.sketch(name)
        shape = sketch.size if sketch else entry["shape"]
        return torch.zeros(shape, dtype=torch.float64) if entry["trained"] else None

    def _module_scales(self, step: int, kind: str) -> dict[str, float]:
        """m of equation (5), by the module's name; only without a noise run."""
        if self.noise is None and step not in self.module_scales:
            scales = self.module_scales[step] = {}
            for name in self.names:
                value = _wide(self.reference.whole(step, kind, name))
                if value is not None and value.numel():
                    size = math.sqrt(float(value.square().mean()))
                    scales[_module_of(name)] = max(size, scales.get(_module_of(name), 0.0))
        return self.module_scales.get(step, {})

    def _compare_norms(self, step: int) -> None:
        """Compares the norms by which gradients were clipped, if both sides clip all gradients by one norm."""
        self.norm_share = 0.0
        expected = _norm(self.reference, step)
        if expected is None:
            return
        noise = _norm(self.noise, step) if self.noise else None
        measured = abs(noise - expected) if noise is not None else self.rounding.assumed * abs(expected) / 2
        allowed = self.rounding.safety * measured + (self.eps / 2 + 1e-5) * abs(expected)
        self.norm_share = allowed / abs(expected) if expected else 0.0
        worst, ranks = 0.0, []
        for rank, value in _norms(self.candidate, step):
            ratio = _ratio(abs(value - expected), allowed)
            worst = max(worst, ratio)
            if ratio > 1:
                ranks.append(rank)
        error = worst * allowed / abs(expected) if expected else worst
        self._add(
            Difference(step, "norm", None, error, allowed / (abs(expected) or 1.0), tuple(ranks), (), error), worst
        )

    # ---- weights and buffers

    def _compare_tensor(self, step: int, what: Compared, name: str, kind: str, share: float = 0.0) -> None:
        """Compares tensors of which each element may differ by `share` more than rounding explains."""
        expected = _wide(self.reference.whole(step, kind, name))
        if expected is None or not self.candidate.tensors(step, kind).parts:
            return
        noise = _wide(self.noise.whole(step, kind, name)) if self.noise else None
        scale = self._module_scales(step, "gradient").get(_module_of(name), 0.0) if kind == "gradient" else 0.0
        bounds = self.rounding.element_bounds(expected, noise, scale) + share * expected.abs()
        self._compare(step, what, name, kind, expected, bounds, None)

    def _compare_weight(self, step: int, name: str) -> None:
        runs = [self.reference, *([self.noise] if self.noise else [])]
        changes = [_change(run, step, name) for run in runs]
        expected = _wide(self.reference.whole(step, "weight", name))
        if changes[0] is None or expected is None or not self.candidate.tensors(step, "weight").parts:
            return
        noise = changes[1] if len(changes) > 1 else None
        bounds = Rounding(2.0**-23, self.rounding.factor).element_bounds(changes[0], noise)
        sketch = self.reference.sketch(name)
        blocks = (sketch.blocks, sketch.columns / sketch.blocks) if sketch else (0, 1.0)
        bounds = weight_bounds(changes[0], bounds, self.uncertainty.get(name), *blocks)
        bounds = bounds + 4 * step * self._start_eps(name) * expected.abs()
        self._compare(step, "weight", name, "weight", expected, bounds, None)

    def _drift(self, step: int) -> float:
        """D of equation (3) of `rounding.py`, from the weights before this step."""
        if step < 1:
            return 1.0
        candidate = noise = 0.0
        for name in self.names:
            own, right = (_change(run, step, name) for run in (self.candidate, self.reference))
            other = _change(self.noise, step, name) if self.noise else self._assumed_change(step, name)
            if own is not None and other is not None and right is not None:
                candidate += float((own - right).square().sum())
                noise += float(((other - right) if self.noise else other).square().sum())
        smallest = 1.0 if self.noise else SMALLEST_ASSUMED_DRIFT
        return drift_factor(math.sqrt(candidate), math.sqrt(noise), smallest)

    def _assumed_change(self, step: int, name: str) -> Tensor | None:
        """By how much a noise run would have changed the weights at the start."""
        weight = _wide(self.reference.whole(step, "weight", name))
        return None if weight is None else perturbation(self.eps) * weight

    # ---- one tensor

    def _compare(
        self,
        step: int,
        what: Compared,
        name: str,
        kind: str,
        expected: Tensor,
        bounds: Tensor,
        row_bounds: Tensor | None,
    ) -> None:
        """Compares each rank's parts with the region of the reference's tensor, and rows of the whole tensor."""
        parts = self.candidate.parts(step, kind, name)
        scale = float(expected.abs().nan_to_num(0.0, posinf=0.0).max()) if expected.numel() else 0.0
        if not parts:
            missing = math.inf if scale > float(bounds.max() if bounds.numel() else 0.0) else 0.0
            if missing:
                self._add(Difference(step, what, name, missing, 0.0), missing)
            return
        worst, error, largest, ranks = 0.0, 0.0, 0.0, set()
        errors = size = 0.0
        for part in parts:
            right, allowed = part.region.of(expected), part.region.of(bounds)
            distance = _distance(part.value.to(torch.float64).reshape(right.shape), right)
            if not distance.numel():
                continue
            errors += float(distance.square().sum())
            size += float(right.square().sum())
            ratios = torch.where(distance == 0, 0.0, distance / allowed.clamp(min=1e-300)).reshape(-1)
            place = int(ratios.argmax())
            if float(ratios[place]) >= worst:
                worst = float(ratios[place])
                error, largest = (float(value.reshape(-1)[place]) / (scale or 1.0) for value in (distance, allowed))
            if not ratios[place] <= 1:
                ranks.add(part.rank)
        if self.candidate.whole(step, kind, name) is None:
            self._note_not_compared(name)
        elif row_bounds is not None and expected.numel():
            for rank, whole in self._copies(step, kind, name):
                shares = row_shares(whole, expected).abs().nan_to_num(0.0)
                place = int((shares / row_bounds).argmax())
                if float(shares[place] / row_bounds[place]) > max(1.0, worst):
                    error, largest = float(shares[place]), float(row_bounds[place])
                    worst = error / largest
                    ranks.add(rank)
        rows: tuple[int, ...] = ()
        if worst > 1:
            own = _wide(self.candidate.whole(step, kind, name, min(ranks, default=None)))
            rows = () if own is None else _differing_rows(own, expected, bounds, row_bounds)
        share = math.sqrt(errors / size) if size else math.inf
        self._add(Difference(step, what, name, error, largest, tuple(sorted(ranks)), rows, share), worst)

    def _copies(self, step: int, kind: str, name: str) -> Iterator[tuple[int, Tensor]]:
        """The candidate's whole tensor, as each rank has it that holds a copy of some part; equal ones once."""
        parts = self.candidate.parts(step, kind, name)
        ranks = list(dict.fromkeys(part.rank for part in parts))
        seen: list[Tensor] = []
        for rank in ranks if len({part.region for part in parts}) < len(parts) else ranks[:1]:
            whole = _wide(self.candidate.whole(step, kind, name, rank))
            if whole is not None and not any(torch.equal(whole, other) for other in seen):
                seen.append(whole)
                yield rank, whole

    def _note_not_compared(self, name: str) -> None:
        if name not in self.result.not_compared:
            self.result.not_compared.append(name)

    def _add(self, difference: Difference, ratio: float) -> None:
        value = ComparedTensor(difference.step, difference.what, difference.name, difference.error, ratio)
        self.result.values.append(value)
        if not ratio <= 1:
            self.result.differences.append(difference)


def _norms(run: RecordedRun, step: int) -> Iterator[tuple[int, float]]:
    """Pairs (rank, norm) of a step; the ranks' norms of parts are put together first."""
    events = run.events("norm", step)
    by_rank: dict[int, float] = {}
    for event in events:
        if event.rank in by_rank:
            return  # several norms a step: those of groups, which the clipped gradients show
        by_rank[event.rank] = float(event["value"])
    if any(event["partial"] for event in events):
        yield 0, math.sqrt(sum(by_rank[event.rank] ** 2 for event in events if event["counted"]))
        return
    yield from sorted(by_rank.items())


def _norm(run: RecordedRun, step: int) -> float | None:
    return next((value for _, value in _norms(run, step)), None)


def _change(run: RecordedRun, step: int, name: str) -> Tensor | None:
    """How a weight has changed since the start."""
    before, after = (_wide(run.whole(at, kind, name)) for at, kind in ((0, "start"), (step, "weight")))
    return None if before is None or after is None else after - before


def _wide(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.to(torch.float64)


def _distance(actual: Tensor, expected: Tensor) -> Tensor:
    """|actual - expected|; infinite where only one side is not a number."""
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    return torch.where(same, 0.0, (actual - expected).abs().nan_to_num(math.inf, posinf=math.inf))


def _differing_rows(whole: Tensor, expected: Tensor, bounds: Tensor, row_bounds: Tensor | None) -> tuple[int, ...]:
    """The first rows of a matrix that differ, by one of their elements or by the share of equation (2)."""
    if expected.dim() < 2 or not expected.numel():
        return ()
    ratios = as_rows(_distance(whole, expected) / bounds.clamp(min=1e-300)).amax(1)
    if row_bounds is not None:
        ratios = torch.maximum(ratios, row_shares(whole, expected).abs().nan_to_num(0.0) / row_bounds)
    return tuple(int(row) for row in (ratios > 1).nonzero().reshape(-1)[:MOST_ROWS])


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _ratio(distance: float, allowed: float) -> float:
    if not math.isfinite(distance):
        return math.inf
    return distance / allowed if allowed else (0.0 if not distance else math.inf)
