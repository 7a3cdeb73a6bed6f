"""What constraints cost: the best plan that keeps them, beside the best plan without them."""

from typing import Any

from meshwright.numbers.units import bytes_text, seconds_text
from meshwright.plan_fields.constraints import FIELDS, Constraints
from meshwright.plan_fields.effects import Numerics
from meshwright.planner.constraints.no_effect import without_effect
from meshwright.planner.search_result import PricedPlan

_AS_FAST = 5e-4
# Fields that change what ranks exchange, which the simulator does not know.
_NOT_PREDICTED = ("gradients.powersgd_rank", "gradients.local_steps", "gradients.servers", "numerics.batch_norm")


def cost_sentences(
    constraints: Constraints, best: PricedPlan, free: PricedPlan, allow: Numerics = "changes"
) -> list[str]:
    """Says how much slower the best plan with constraints is than the `free` one, which of them have no effect, and
    which the search without them may not choose because of `allow`."""
    slower = best.prediction.step_s / free.prediction.step_s - 1
    other = f"the best plan without them, {free.plan.summary()} ({bytes_text(free.needed_bytes)})"
    words = constraints.describe()
    if best.plan == free.plan:
        sentences = [f"The constraints ({words}) cost nothing: the best plan without them is the same."]
    elif abs(slower) < _AS_FAST:
        sentences = [f"The constraints ({words}) cost nothing: {other}, is as fast."]
    elif slower > 0:
        sentences = [
            f"The constraints ({words}) cost {slower:.1%}: {other}, takes {seconds_text(free.prediction.step_s)} a"
            " step."
        ]
    else:
        why = (
            "It is preferred because it is simpler and the difference is within the error of predictions, or the search"
            " without constraints does not try such plans."
        )
        if beyond := constraints.beyond(allow):
            why = f"By itself, the search does not choose {beyond}, because allow is {allow}."
        sentences = [
            f"The constraints ({words}) cost nothing: {other}, takes {seconds_text(free.prediction.step_s)} a step."
            f" {why}"
        ]
    for name, why in without_effect(best.plan, constraints).items():
        sentences.append(f"{name} has no effect in this plan, {why}.")
    for name in _NOT_PREDICTED:
        if name in constraints.fix and constraints.fix[name] != FIELDS[name].default:
            sentences.append(f"What {name} changes is not predicted: the step is that of a plan without it.")
    return sentences


def cost_values(constraints: Constraints, best: PricedPlan, free: PricedPlan) -> dict[str, Any]:
    """The same for JSON: the constraints, the best plan without them, and the share by which it is faster."""
    return {
        **constraints.model_dump(mode="json"),
        "free": {
            "plan": free.plan.model_dump(mode="json"),
            "summary": free.plan.summary(),
            "step_s": free.prediction.step_s,
            "memory_bytes": free.prediction.memory_bytes,
        },
        "cost": best.prediction.step_s / free.prediction.step_s - 1,
    }
