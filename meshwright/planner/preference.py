"""Which of several predicted plans is preferred. Predictions have errors, so a plan that is predicted to be a little
faster may be slower. Such a difference does not justify a more complicated plan.

    error of a difference   `ERROR` of the time in which two plans differ: terms of the step that are equal in both
                            predictions have the same error in both                                difference_error_s
    complexity              how many choices a plan makes beyond plain replicas                             complexity
    preferred               the simplest plan that is slower than the fastest by no more than the error of the
                            difference, or than `_LEAST`; of equally simple ones the fastest, or one that is slower by
                            no more than `_LEAST` and does not compile the whole model                     preferred
"""

from collections.abc import Sequence

from meshwright.plan import Plan
from meshwright.simulator.predict import Prediction

# The error of predicted steps, as docs/plan.md states it: a median of 1.1% to 5.6% by precision for eager steps with
# calibrated operators, of 4.6% for compiled ones, and 3% on idle CPU cores.
ERROR = 0.05
# A chosen value: what saves less is not worth the additional seconds before the first step, or other last bits.
_LEAST = 0.01

PredictedPlan = tuple[Plan, Prediction]

# Fields of a plan that follow from other choices, or that cost a user nothing. CUDA graphs are among them because they
# gain most where predictions are least certain: on a slow host.
_IMPLIED = {
    "axes": {"replicate"},
    "modules": {"sequence", "loss"},
    "pipeline": {"microbatches", "cuts"},
    "memory": {"sharding"},
    "gradients": {"algorithm"},
    "compute": {"threads", "cuda_graphs"},
}


def complexity(plan: Plan) -> int:
    """The number of choices that a plan makes beyond plain replicas: fields that differ from their defaults, and
    several stages on a rank."""
    fields = sum(
        getattr(group, name) != field.default
        for group_name, group in plan
        for name, field in type(group).model_fields.items()
        if name not in _IMPLIED.get(group_name, ())
    )
    if plan.numerics.precision not in ("fp32", "tf32") and plan.compute.layout == "channels_last":
        fields -= 1  # in lower precisions, all images are laid out like this
    return fields + (plan.stages_per_rank > 1)


def preferred(plans: Sequence[PredictedPlan], given_up_s: float = 0.0) -> int:
    """The index of the preferred plan. `given_up_s` are the seconds by which earlier preferences have made these plans
    slower: what is given up in total does not exceed the error either."""
    fastest = min((prediction for _, prediction in plans), key=_step_s)

    def is_acceptable(prediction: Prediction) -> bool:
        slower_s = prediction.step_s - fastest.step_s
        return slower_s <= _LEAST * fastest.step_s or slower_s + given_up_s <= difference_error_s(prediction, fastest)

    acceptable = [index for index, (_, prediction) in enumerate(plans) if is_acceptable(prediction)]
    least_complex = min(complexity(plans[index][0]) for index in acceptable)
    simplest = [index for index in acceptable if complexity(plans[index][0]) == least_complex]
    longest_s = (1 + _LEAST) * min(_step_s(plans[index][1]) for index in simplest)
    equally_fast = [index for index in simplest if _step_s(plans[index][1]) <= longest_s]
    # A compiled model needs longer before the first step than its compiled blocks.
    return min(equally_fast, key=lambda index: (plans[index][0].compute.compile == "model", _step_s(plans[index][1])))


def describe_preference(plan: Plan, prediction: Prediction, faster: PredictedPlan) -> str:
    """Says why this plan is preferred to another one, whose predicted step is shorter."""
    faster_plan, faster_prediction = faster
    gain = 1 - faster_prediction.step_s / prediction.step_s
    return (
        f"{difference(faster_plan, plan) or faster_plan.summary()} is predicted to be {gain:.1%} faster, which is"
        f" within the error of predictions ({ERROR:.0%} of the time that differs)"
    )


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
