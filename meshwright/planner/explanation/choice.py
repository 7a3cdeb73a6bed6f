"""The line at the top of a run and of `meshwright plan`: which plan was chosen, what its way of running operators
gains, and what it would gain if it might change the numerical result more (`allow`)."""

from dataclasses import replace

from meshwright.errors import InputError
from meshwright.numbers.units import seconds_text
from meshwright.plan import Plan
from meshwright.plan_fields.effects import NUMERICS, Numerics
from meshwright.plan_fields.groups import Compute, NumericsGroup
from meshwright.planner.compute_variants import best_variant, traits_of
from meshwright.planner.explanation.explain import preference
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.preference import difference
from meshwright.planner.profiles import Profiles
from meshwright.planner.search_result import SearchResult
from meshwright.simulator.predict import Prediction, predict_plan

_NOTABLE = 0.03  # a larger `allow` that saves a smaller share of the step is not mentioned


def describe_choice(result: SearchResult, inputs: PlanningInputs, profiles: Profiles) -> str:
    """Returns the line, such as `plan: replicate 2 · fp32 · fused optimizer, 12.1 ms a step predicted (13 ms without
    fused optimizer); with allow: changes, bf16 would take 6.3 ms`."""
    best = result.ranked[0]
    words = f"plan: {best.plan.summary()}, {seconds_text(best.prediction.step_s)} a step predicted"
    plain = best.plan.model_copy(update={"compute": Compute(layout=best.plan.compute.layout)})
    if plain != best.plan and not inputs.constraints:
        prediction = _predicted(plain, inputs, profiles)
        words += f" ({seconds_text(prediction.step_s)} without {difference(best.plan, plain)})"
    if reason := preference(result):
        words += f"; {reason}"
    for allow in NUMERICS[NUMERICS.index(inputs.allow) + 1 :]:
        faster = _fastest_with(allow, result, inputs, profiles)
        if faster is not None and faster[1].step_s < (1 - _NOTABLE) * best.prediction.step_s:
            plan, prediction = faster
            more = difference(plan, best.plan)
            return f"{words}; with allow: {allow}, {more} would take {seconds_text(prediction.step_s)}"
    return words


def _fastest_with(
    allow: Numerics, result: SearchResult, inputs: PlanningInputs, profiles: Profiles
) -> tuple[Plan, Prediction] | None:
    """Returns the fastest plan with the axes of the best plan that this `allow` permits, with its prediction. Returns
    None if it is not known: plans with another precision need another profile, which is traced only if that takes no
    longer than the search took."""
    best, summary = result.ranked[0], result.summary
    larger = replace(inputs, allow=allow)

    def predict(plan: Plan) -> Prediction:
        return _predicted(plan, inputs, profiles)

    options = []
    for precision in larger.precisions_to_try():
        plan = _with_precision(best.plan, precision, summary.has_convolutions)
        is_traced = profiles.is_traced(precision, plan.memory.recompute)
        if not is_traced and profiles.trace_s > result.seconds:
            continue
        try:
            inputs.check_plan(plan)
            prediction = predict(plan)
            options.append(best_variant(plan, prediction, larger, predict, traits_of(summary.profile)))
        except InputError:  # the model cannot be run or traced in this precision
            continue
    fitting = [option for option in options if inputs.fits(option[1])]
    return min(fitting, key=lambda option: option[1].step_s, default=None)


def _predicted(plan: Plan, inputs: PlanningInputs, profiles: Profiles) -> Prediction:
    profile = profiles.get(plan.numerics.precision, plan.memory.recompute)
    return predict_plan(inputs.cluster, profile, plan, inputs.global_batch, inputs.optimizer, runtime=inputs.runtime)


def _with_precision(plan: Plan, precision: str, images: bool) -> Plan:
    """Returns the plan as the search would propose it in this precision, before the variants of its `compute`
    fields."""
    numerics = NumericsGroup.model_validate({"precision": precision})
    layout = Compute(layout="channels_last" if images and precision != "fp32" else "contiguous")
    return plan.model_copy(update={"numerics": numerics, "compute": layout})
