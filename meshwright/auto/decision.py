"""Why a job is trained with its plan. A `Decision` is made by decide.py. The folder of a run keeps the reasons beside
the plan (reasons.yaml), where what fails in the run changes them (train/tuning/fallbacks.py)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.plan import Plan
from meshwright.plan_fields.constraints import FIELDS, default_of
from meshwright.plan_rules.no_effect import why_without_effect
from meshwright.simulator.predict import Prediction
from meshwright.train.tuning.variants import Variant

# The fields in which variants differ that are timed (planner/compute_variants.py: variants_to_time).
TIMED = tuple(f"compute.{name}" for name in ("layout", "convolutions", "compile", "cuda_graphs", "fused_optimizer"))
WRITTEN = "written in the plan"
DEFAULT = "the default"


@dataclass(frozen=True)
class Decision:
    """The plan that a job is trained with. `reasons` says for each of its fields, by name (`axes.replicate`), why it
    has its value. `prediction` is None without one. `line` says how `plan: auto` has chosen the plan, or why nothing
    was predicted; None if the job names its plan. `variants` returns the variants of the plan that may be timed: none
    if the plan was named by the job or stored in a run, and not found by a search."""

    plan: Plan
    reasons: Mapping[str, str] = field(default_factory=dict)
    prediction: Prediction | None = None
    line: str | None = None
    variants: Callable[[], list[Variant]] = list

    @property
    def step_s(self) -> float | None:
        """The predicted seconds of a step."""
        return self.prediction.step_s if self.prediction is not None else None

    def changed(self, plan: Plan, reason: str) -> "Decision":
        """The decision for this plan instead. `reason` is that of the fields that have another value now."""
        return replace(self, plan=plan, reasons={**self.reasons, **dict.fromkeys(changes(self.plan, plan), reason)})

    def measured(self, plan: Plan, line: str) -> "Decision":
        """The decision for the variant of the plan that was measured to be the fastest. `line` says what was measured;
        empty if nothing was."""
        reasons = {**self.reasons, **dict.fromkeys(TIMED, f"measured: {line}")} if line else self.reasons
        return replace(self, plan=plan, reasons=reasons)


def values_of(plan: Plan) -> Iterator[tuple[str, Any]]:
    """The fields of a plan by name, with their values."""
    for name in FIELDS:
        group, _, own = name.partition(".")
        yield name, getattr(getattr(plan, group), own)


def changes(before: Plan, after: Plan) -> list[str]:
    """The names of the fields that have different values in two plans."""
    return [name for (name, old), (_, new) in zip(values_of(before), values_of(after), strict=True) if old != new]


def reasons_of(plan: Plan, reason: str, of_default: str = DEFAULT) -> dict[str, str]:
    """A reason for each field of a plan: `reason` for those with other values than their defaults, `of_default` for the
    others. Fields that have no effect in the plan say what would give them one."""
    reasons = {}
    for name, value in values_of(plan):
        is_default = value == default_of(name)
        without_effect = why_without_effect(name, plan) if is_default else None
        if without_effect is not None:
            reasons[name] = f"has no effect in this plan, {without_effect}"
        else:
            reasons[name] = of_default if is_default else reason
    return reasons
