"""Which variant of the `compute` fields of a plan is taken, by timing a few steps of each within a budget.

    variants    in the order in which they are ready: eager steps first, compiled ones after them
    measured    each until its timing would take it beyond the budget; one that differs from another only in CUDA graphs
                of the whole step together with it, because they are compiled alike. A variant that fails on a rank, or
                whose losses are not those of the first variant that was measured (the eager one), is left out on all
                ranks
    taken       the one whose slowest rank has the shortest step; of equally fast ones (`_LEAST_GAIN`) the first
    beyond      if the budget is used up before the compiled model was timed: the compiled model, with or without CUDA
                graphs as predictions prefer, with the optimizer and the layout of the fastest eager variant; if
                predictions prefer it to what was measured, or to eager steps where nothing was

This module only decides. What times a variant on the ranks is given as a function, which returns the same timings on
every rank, so that all ranks decide alike.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from meshwright.plan import Plan
from meshwright.plan_fields.groups import Compute
from meshwright.progress import phase

LONGEST_BUDGET_S = 60.0  # the default, and of a run of unknown length
_SHARE_OF_RUN = 0.05  # tuning takes at most this share of the run's predicted time
LEAST_BUDGET_S = 1.0  # in less, hardly anything can be timed
_LEAST_GAIN = 0.005  # the medians of measured steps differ by about as much from one measurement to the next
# Measured on the host of an H200: VGG16 15 s, ResNet-50 55 s, GPT-2 with 48 blocks 145 s. Kernels that an earlier run
# has compiled are read from a cache, and equal blocks are traced once, so it may well take half of it.
_COMPILE_S, _COMPILE_S_PER_LAYER = 10.0, 0.3
_COMPILES_WITHIN = 2.0
# How far the loss of a step may be from that of the eager step, relative to it. Chosen values: several times the
# rounding of the precision. Losses after an update of the weights may differ `_AFTER_UPDATES` times as much.
_TOLERANCES = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 3e-2, "fp16": 1e-2, "fp8": 1e-1}
_AFTER_UPDATES = 4.0
_SPREADS = 4.0  # and by so many times what the eager loss differs between steps with other random numbers


@dataclass(frozen=True)
class Variant:
    """A plan whose steps may be timed, and its predicted seconds per step; None without a prediction."""

    plan: Plan
    predicted_s: float | None = None


@dataclass
class Timing:
    """What timing a variant has shown on one rank so far.

    seconds       what the timing took, with building the model and compiling it
    step_s        the median seconds of a step; None if it could not be timed
    losses        of the first steps
    spread        by how much the loss differs if only the random numbers of the step differ; 0 if it was not looked at
    failure       why it could not be timed; None if it could, or if it was not finished
    uncaptured_s  for a variant with CUDA graphs of the whole step: the median seconds of a step without them
    replayed      for such a variant: the loss of a replayed step, and that of the same step without the graph
    """

    seconds: float = 0.0
    step_s: float | None = None
    losses: tuple[float, ...] = ()
    spread: float = 0.0
    failure: str | None = None
    uncaptured_s: float | None = None
    replayed: tuple[float, float] | None = None

    @property
    def without_graphs(self) -> "Timing":
        """The timing of the variant without CUDA graphs, which it contains."""
        failure = self.failure if self.uncaptured_s is None else None
        return replace(self, step_s=self.uncaptured_s, failure=failure, uncaptured_s=None, replayed=None)


_Named = tuple[Variant, str]  # with its name
_Measured = tuple[float, Variant, str]  # the seconds of a step on the slowest rank, and the name
Measure = Callable[[Plan, float, bool], Sequence[Timing]]
"""Times a variant on all ranks within so many seconds, and returns the timings by rank. The last argument says whether
to find the `spread` of the losses."""


@dataclass(frozen=True)
class Choice:
    """The plan that is taken, and a line that says what was measured; empty if nothing was tried and nothing changes.
    `is_complete`: no variant was left out because of the budget. `is_measured`: some variant was measured."""

    plan: Plan
    line: str
    is_complete: bool
    is_measured: bool


def default_budget_s(steps: int | None, step_s: float | None) -> float:
    """The seconds that tuning may take in a run of so many steps; None for what is not known."""
    if steps is None or step_s is None:
        return LONGEST_BUDGET_S
    return min(LONGEST_BUDGET_S, _SHARE_OF_RUN * steps * step_s)


def expected_compile_s(model: nn.Module) -> float:
    """About how many seconds compiling a model may take."""
    layers = sum(not any(True for _ in module.children()) for module in model.modules())
    return _COMPILE_S + _COMPILE_S_PER_LAYER * layers


def kept_plan(plan: Plan, variants: Sequence[Variant], compute: Compute) -> Plan | None:
    """Returns the plan with these fields, which were the fastest in an earlier measurement; None if no variant of the
    plan has one of them any more."""
    known = [plan.compute, *(variant.plan.compute for variant in variants)]
    if all(any(getattr(other, name) == value for other in known) for name, value in compute):
        return plan.model_copy(update={"compute": compute})
    return None


def fastest_variant(
    plan: Plan,
    variants: Sequence[Variant],
    measure: Measure,
    budget_s: float,
    compile_s: float,
    notify: Callable[[str], None],
) -> Choice:
    """Times the variants of a plan and returns the fastest. Compiling one is expected to take `compile_s`. `notify` is
    called with a line for each variant that is left out because of what it does."""
    measurements = _Measurements(measure, budget_s, compile_s, notify)
    names = variant_names([variant.plan for variant in variants])
    for group in _compiled_alike(list(zip(variants, names, strict=True))):
        measurements.add(group)
    measured, unfinished = measurements.measured, measurements.unfinished
    if (combined := _combined(measured)) is not None:
        name = variant_names([*(variant.plan for variant in variants), combined.plan])[-1]
        measurements.add([(combined, name)])
    taken, note = _taken(plan, measured, _best_compiled(variants, unfinished))
    line = _describe(measured, measurements.spent_s, note)
    if not line and taken != plan:
        line = f"the budget is too small to time variants: {variant_names([taken])[0]}, as predictions prefer"
    return Choice(taken, line, not unfinished, bool(measured))


@dataclass
class _Measurements:
    """What was measured so far: `measured`, and the variants that are left for lack of time, `unfinished`."""

    measure: Measure
    budget_s: float
    compile_s: float
    notify: Callable[[str], None]
    spent_s: float = 0.0
    measured: list[_Measured] = field(default_factory=list)
    unfinished: list[Variant] = field(default_factory=list)
    _eager: Sequence[Timing] | None = None
    _failures: list[str] = field(default_factory=list)

    def add(self, group: Sequence[_Named]) -> None:
        """Measures a variant, or two of which the second has CUDA graphs besides, if there is time."""
        variant, name = group[-1]
        left_s, compiles = self.budget_s - self.spent_s, variant.plan.compute.compile != "none"
        is_too_long = left_s < LEAST_BUDGET_S or (compiles and self.compile_s > _COMPILES_WITHIN * left_s)
        fails_always = not self.measured and len(self._failures) > len(set(self._failures))
        if is_too_long or fails_always:
            self.unfinished += [variant for variant, _ in group]
            return
        with phase(f"timing steps: {group[0][1]}", self.compile_s if compiles else None):
            timings = self.measure(variant.plan, left_s, self._eager is None)
        self.spent_s += max(timing.seconds for timing in timings)
        if len(group) > 1:  # both are in these timings
            without = [timing.without_graphs for timing in timings]
            if not self._note(*group[0], without):
                return  # what is wrong without CUDA graphs is wrong with them
        self._note(variant, name, timings)

    def _note(self, variant: Variant, name: str, timings: Sequence[Timing]) -> bool:
        """Notes what was measured. Returns whether the variant may be taken."""
        if reason := _reason_to_leave_out(timings, self._eager, variant.plan):
            self._failures.append(reason)
            self.notify(f"{name} is left out: {reason}")
            return False
        if any(timing.step_s is None for timing in timings):
            self.unfinished.append(variant)
            return True
        self._eager = self._eager or timings
        self.measured.append((max(timing.step_s or 0.0 for timing in timings), variant, name))
        return True


def _compiled_alike(named: Sequence[_Named]) -> Iterator[Sequence[_Named]]:
    """Yields each variant, together with the one that has CUDA graphs of the whole step besides."""
    taken: list[Plan] = []
    for variant, name in named:
        plan = variant.plan
        if plan in taken:
            continue
        captured = plan.model_copy(update={"compute": plan.compute.model_copy(update={"cuda_graphs": True})})
        group = [(variant, name)]
        if plan.processes == 1 and not plan.compute.cuda_graphs:
            group += [other for other in named if other[0].plan == captured]
        taken += [member.plan for member, _ in group]
        yield group


def _combined(measured: Sequence[_Measured]) -> Variant | None:
    """If the fastest variant is compiled or uses CUDA graphs, returns it with the memory layout and the optimizer of
    the fastest eager one; None if it has them already."""
    fastest = min(measured, key=lambda item: item[0], default=None)
    eager = [item for item in measured if _is_eager(item[1])]
    if fastest is None or not eager or _is_eager(fastest[1]):
        return None
    combined = _with_kernels_of(min(eager, key=lambda item: item[0])[1].plan, fastest[1].plan)
    return None if any(combined == variant.plan for _, variant, _ in measured) else Variant(combined)


def _with_kernels_of(eager: Plan, plan: Plan) -> Plan:
    """Returns the plan with the memory layout and the optimizer of another one, whose steps are eager."""
    kernels = eager.compute
    fields: dict[str, Any] = {"fused_optimizer": kernels.fused_optimizer}
    if kernels.convolutions == "default":  # NNPACK's are not compiled
        fields["layout"] = kernels.layout
    return plan.model_copy(update={"compute": plan.compute.model_copy(update=fields)})


def _is_eager(variant: Variant) -> bool:
    return variant.plan.compute.compile == "none" and not variant.plan.compute.cuda_graphs


def _best_compiled(variants: Sequence[Variant], unfinished: Sequence[Variant]) -> Variant | None:
    """Returns the compiled model, without or with CUDA graphs, whichever of those that are beyond the budget is
    predicted to be faster; None if both were measured or left out."""
    whole = next(
        (v.plan for v in variants if v.plan.compute.compile != "none" and not v.plan.compute.cuda_graphs), None
    )
    if whole is None:
        return None
    captured = whole.model_copy(update={"compute": whole.compute.model_copy(update={"cuda_graphs": True})})
    choices = [variant for variant in unfinished if variant.plan in (whole, captured)]
    return min(choices, key=lambda variant: (variant.predicted_s or math.inf, variant.plan != whole), default=None)


def _taken(plan: Plan, measured: Sequence[_Measured], compiled: Variant | None) -> tuple[Plan, str]:
    """Returns the plan that is taken, and what the line adds about it. `compiled` is the compiled model that is beyond
    the budget, if there is one."""
    if not measured:
        return (compiled.plan if compiled is not None and plan.compute.compile != "none" else plan), ""
    shortest_s = min(step_s for step_s, _, _ in measured)
    best = next(variant for step_s, variant, _ in measured if step_s <= (1 + _LEAST_GAIN) * shortest_s)
    if compiled is None or (compiled.predicted_s or math.inf) >= (1 - _LEAST_GAIN) * (best.predicted_s or 0.0):
        return best.plan, ""
    eager = [item for item in measured if _is_eager(item[1])]
    fastest_eager = min(eager, key=lambda item: item[0])[1].plan if eager else compiled.plan
    taken = _with_kernels_of(fastest_eager, compiled.plan)
    return taken, f"; {variant_names([taken])[0]} is beyond the budget and taken, as predictions prefer it"


def _describe(measured: Sequence[_Measured], spent_s: float, note: str) -> str:
    if not measured:
        return f"no variant could be measured in {spent_s:.0f} s, predictions decide" if spent_s else ""
    count = f"{len(measured)} variant{'s' if len(measured) > 1 else ''}"
    times = ", ".join(f"{name} {step_s * 1e3:.3g} ms" for step_s, _, name in sorted(measured, key=lambda item: item[0]))
    return f"measured {count} in {spent_s:.0f} s: {times}{note}"


# ---- which variants compute the same


def _reason_to_leave_out(timings: Sequence[Timing], reference: Sequence[Timing] | None, plan: Plan) -> str | None:
    """Returns why the variant cannot be taken, or None if nothing speaks against it."""
    where = [""] if len(timings) == 1 else [f" (rank {rank})" for rank in range(len(timings))]
    for timing, place in zip(timings, where, strict=True):
        if timing.failure is not None:
            return timing.failure + place
    if reference is None or any(timing.step_s is None for timing in timings):
        return None
    for timing, place in zip(timings, where, strict=True):
        if timing.replayed is not None:
            loss, expected = timing.replayed
            if not _is_same_loss(loss, expected, reference[0], 0, str(plan.numerics.precision)):
                return f"the loss of a replayed step is {loss:.6g}, and {expected:.6g} without CUDA graphs{place}"
    for timing, eager, place in zip(timings, reference, where, strict=True):
        for number, (loss, expected) in enumerate(zip(timing.losses, eager.losses, strict=False)):
            if not _is_same_loss(loss, expected, eager, number, str(plan.numerics.precision)):
                return f"its loss in step {number} is {loss:.6g}, and {expected:.6g} in eager steps{place}"
    return None


def _is_same_loss(loss: float, expected: float, eager: Timing, step: int, precision: str) -> bool:
    if not math.isfinite(expected):
        return True  # nothing can be compared with it
    tolerance = _TOLERANCES.get(precision, 1e-3) * (_AFTER_UPDATES if step else 1.0)
    scale = max(abs(expected), abs(eager.losses[0]) if math.isfinite(eager.losses[0]) else 0.0)
    return abs(loss - expected) <= tolerance * scale + _SPREADS * eager.spread  # False for NaN


# ---- names


def variant_names(plans: Sequence[Plan]) -> list[str]:
    """Names of variants for people, such as `compiled with CUDA graphs`. Layouts, kernels and optimizers are named
    where variants differ in them."""
    computes = [plan.compute for plan in plans]
    fields = ("layout", "convolutions", "fused_optimizer")
    named = [name for name in fields if len({getattr(compute, name) for compute in computes}) > 1]
    names = []
    for compute in computes:
        words = {"none": "eager", "blocks": "compiled blocks", "model": "compiled"}[compute.compile]
        if compute.cuda_graphs:
            words = "CUDA graphs" if compute.compile == "none" else f"{words} with CUDA graphs"
        more = {
            "layout": compute.layout if compute.layout != "contiguous" else "",
            "convolutions": "NNPACK" if compute.convolutions == "nnpack" else "",
            "fused_optimizer": "fused optimizer" if compute.fused_optimizer else "",
        }
        names.append(" and ".join([words, *(more[name] for name in named if more[name])]))
    return names
