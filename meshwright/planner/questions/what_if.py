"""`ask what-if`: the best plan of a cluster as it is, and with each of several changes."""

from collections.abc import Sequence

from meshwright.numbers.units import number_text
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.profiles import Profiles
from meshwright.planner.questions.answer import Answer, PlannedPoint, estimates
from meshwright.planner.questions.sweep import sweep_points

_AS_IT_IS = "as it is"
_AS_FAST = 5e-4  # a difference of two speeds that is called none


def what_if(changes: Sequence[str], inputs: PlanningInputs, profiles: Profiles) -> Answer:
    """Answers what each change (`link=2x`, `memory=141GB`) would do to the best plan."""
    (point,), others = sweep_points("batch", [str(inputs.global_batch)], inputs, profiles, changes)
    rows = {_AS_IT_IS: point, **{change: some[0] for change, some in others.items()}}
    table = tuple((label, *other.cells()[:2], _gain(other, point), *other.cells()[2:]) for label, other in rows.items())
    return Answer(
        "what-if",
        ("cluster", "step", "samples/s", "gain", "memory", "plan"),
        table,
        (*(_sentence(change, rows[change], point) for change in others), *estimates([point])),
        {"rows": [{**other.values(), "change": label} for label, other in rows.items()]},
    )


def _gain(other: PlannedPoint, point: PlannedPoint) -> str:
    if other.best is None or point.best is None:
        return "–"
    return f"{other.samples_per_s / point.samples_per_s - 1:+.1%}"


def _sentence(change: str, other: PlannedPoint, point: PlannedPoint) -> str:
    name = point.inputs.cluster.name
    if other.best is None:
        return f"With {change}, no plan fits on '{name}'{'' if point.best else ' either'}."
    speed = number_text(other.samples_per_s)
    if point.best is None:
        return f"With {change}, a plan would fit on '{name}', and train {speed} samples per second."
    gain = other.samples_per_s / point.samples_per_s - 1
    same = other.best.plan == point.best.plan
    plan = "with the same plan" if same else f"with {other.best.plan.summary()}"
    if abs(gain) < _AS_FAST:
        return f"With {change}, '{name}' would be as fast as it is, {plan}."
    more = f"{abs(gain):.1%} {'more' if gain >= 0 else 'fewer'} samples per second"
    return f"With {change}, '{name}' would train {more} ({speed}), {plan}."
