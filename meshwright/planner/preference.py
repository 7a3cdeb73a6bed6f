"""Which of several predicted plans is preferred. Predictions have errors, so a plan that is predicted to be a little
faster may be slower. Such a difference does not justify a more complicated plan.

    error of a difference   `ERROR` of the time in which two plans differ: terms of the step that are equal in both
                            predictions have the same error in both                                difference_error_s
    simple                  fewer axes; then fewer fields that differ from their defaults; then shards rather than
                            layers divided over ranks, and these rather than a pipeline                    simplicity
    accepted                slower than the fastest plan by no more than `LEAST`, or by no more than `MOST` and the
                            error of the difference                                                     is_acceptable
    preferred               the simplest plan that is accepted; of equally simple ones the fastest, or one that is
                            slower by no more than `LEAST` and does not compile the whole model             preferred
"""

from collections.abc import Sequence

from meshwright.plan import Plan
from meshwright.simulator.predict import Prediction

# The error of predicted steps, as docs/plan.md states it: a median of 1.1% to 5.6% by precision for eager steps with
# calibrated operators, of 4.6% for compiled ones, and 3% on idle CPU cores.
ERROR = 0.05
# Chosen values: what saves less than LEAST is not worth the additional seconds before the first step, or other last
# bits; nothing that saves more than MOST is given up. MOST is below 3%, by which no other plan may be faster than the
# answer (validation/search), because the search does not simulate every plan.
LEAST = 0.01
MOST = 0.02

PredictedPlan = tuple[Plan, Prediction]

# Fields of a plan that follow from other choices, or that cost a user nothing. CUDA graphs are among them because they
# gain most where predictions are least certain: on a slow host.
_IMPLIED = {
    "axes": {"replicate", "shard", "context", "tensor", "pipeline", "expert"},
    "modules": {"sequence", "loss"},
    "pipeline": {"microbatches", "cuts"},
    "memory": {"sharding"},
    "gradients": {"algorithm"},
    "compute": {"threads", "cuda_graphs"},
}
_AXES = ("replicate", "shard", "tensor", "pipeline", "context", "expert")  # the simplest first


def complexity(plan: Plan) -> int:
    """The number of choices that a plan makes beyond its axes: fields that differ from their defaults, and several
    stages on a rank."""
    fields = sum(
        getattr(group, name) != field.default
        for group_name, group in plan
        for name, field in type(group).model_fields.items()
        if name not in _IMPLIED.get(group_name, ())
    )
    if plan.numerics.precision not in ("fp32", "tf32") and plan.compute.layout == "channels_last":
        fields -= 1  # in lower precisions, all images are laid out like this
    return fields + (plan.stages_per_rank > 1)


def simplicity(plan: Plan) -> tuple[int, int, int]:
    """The order of plans by how simple they are: the simpler one is the smaller."""
    axes = [index for index, name in enumerate(_AXES) if getattr(plan.axes, name) > 1]
    return len(axes), complexity(plan), max(axes, default=0)


def is_acceptable(prediction: Prediction, fastest: Prediction) -> bool:
    """Whether a simpler plan with this prediction is taken in place of the fastest one."""
    slower_s = prediction.step_s - fastest.step_s
    if slower_s <= LEAST * fastest.step_s:
        return True
    return slower_s <= min(MOST * fastest.step_s, difference_error_s(prediction, fastest))


def preferred(plans: Sequence[PredictedPlan]) -> int:
    """The index of the preferred plan."""
    fastest = min((prediction for _, prediction in plans), key=_step_s)
    acceptable = [index for index, (_, prediction) in enumerate(plans) if is_acceptable(prediction, fastest)]
    simplest = min(simplicity(plans[index][0]) for index in acceptable)
    equally_simple = [index for index in acceptable if simplicity(plans[index][0]) == simplest]
    longest_s = (1 + LEAST) * min(_step_s(plans[index][1]) for index in equally_simple)
    equally_fast = [index for index in equally_simple if _step_s(plans[index][1]) <= longest_s]
    # A compiled model needs longer before the first step than its compiled blocks.
    return min(equally_fast, key=lambda index: (plans[index][0].compute.compile == "model", _step_s(plans[index][1])))


def describe_preference(plan: Plan, prediction: Prediction, faster: PredictedPlan) -> str:
    """Says why this plan is preferred to another one, whose predicted step is shorter."""
    faster_plan, faster_prediction = faster
    gain = 1 - faster_prediction.step_s / prediction.step_s
    words = difference(faster_plan, plan) or faster_plan.summary()
    return f"within {MOST:.0%} of the fastest, and simpler: {words} is predicted to be {gain:.1%} faster"


def difference(plan: Plan, other: Plan) -> str:
    """The parts of the plan's summary that the other plan's summary does not have."""
    known = other.summary().split(" · ")
    return " · ".join(part for part in plan.summary().split(" · ") if part not in known)


def _step_s(prediction: Prediction) -> float:
    return prediction.step_s


def difference_error_s(prediction: Prediction, other: Prediction) -> float:
    """The error, in seconds, of the difference between two predicted steps."""
    differing_s = 0.0
    for name in {*prediction.breakdown, *other.breakdown}:
        seconds = (prediction.breakdown.get(name, 0.0), other.breakdown.get(name, 0.0))
        if max(seconds) - min(seconds) > 1e-6 * max(seconds):
            differing_s += max(seconds)
    return ERROR * differing_s
