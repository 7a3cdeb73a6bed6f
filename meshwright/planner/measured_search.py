"""The search on this machine, where the model's operators are measured. On other clusters, it is the search alone."""

import warnings
from dataclasses import replace
from functools import partial

from meshwright.calibrate.model_operators import BUDGET_S, is_this_machine, measure_model_operators
from meshwright.dtypes import HALF_DTYPES
from meshwright.plan import Plan
from meshwright.planner.inputs import PlanningInputs, fp32_image_kernels
from meshwright.planner.offload import search_with_offload
from meshwright.planner.profiles import Profiles
from meshwright.planner.search_result import SearchResult
from meshwright.profile.tracing.real_steps import failure_of_step
from meshwright.profile.tracing.real_tensors import has_values, model_device
from meshwright.profile.values import ModelProfile
from meshwright.progress import phase

# The operators of each plan that is considered are measured for about this time, and not again in later searches.
_MEASURE_OPERATORS_S = 1.0
_MOST_MEASURED_PLANS = 4


def measured_search(inputs: PlanningInputs, profiles: Profiles) -> tuple[SearchResult, PlanningInputs]:
    """Searches, on this machine with measured times of the model's operators. The times of shapes that were not
    measured are interpolated, and may make a plan seem faster than it is. So the operators of the plan that is found
    are measured, too, until the search finds one whose operators were measured before. Returns the result, and the
    inputs with the measured times."""
    if not is_this_machine(inputs.cluster):
        return _search(inputs, profiles), inputs
    inputs = _with_precisions_that_run(inputs, profiles)
    with phase("measuring the model's operators on this machine"):
        inputs = with_measured_operators(inputs, profiles, _MEASURE_OPERATORS_S)
    result = _search(inputs, profiles)
    measured: list[Plan] = []
    for _ in range(_MOST_MEASURED_PLANS):
        plan = result.ranked[0].plan
        if plan in measured or _is_plain_replica(plan):
            break
        measured.append(plan)
        profile = profiles.get(plan.numerics.precision, plan.memory.recompute)
        with phase(f"measuring the operators of {plan.summary()}"):
            cluster = measure_model_operators(inputs.cluster, profile, plan, inputs.global_batch, _MEASURE_OPERATORS_S)
        inputs = replace(inputs, cluster=cluster)
        result = _search(inputs, profiles)
    return result, inputs


def _with_precisions_that_run(inputs: PlanningInputs, profiles: Profiles) -> PlanningInputs:
    """Returns the inputs without the half precisions in which a real step of the model fails on its device, because
    some of its operators have no kernel for them. Traces do not show this. The same inputs, if the constraints fix the
    precision, if the model is not on this machine's devices, or if it fails in fp32, too."""
    precisions, model = inputs.precisions_to_try(), profiles.model
    lower = [precision for precision in precisions if precision in HALF_DTYPES]
    is_fixed = "numerics.precision" in inputs.constraints.fixed
    is_here = model_device(model).type == inputs.cluster.kind and has_values(model, profiles.sample)
    if not lower or is_fixed or not is_here:
        return inputs
    fails = partial(failure_of_step, model, profiles.sample, profiles.loss, target=profiles.target)
    reasons = {precision: reason for precision in lower if (reason := fails(precision=precision))}
    if not reasons or fails(precision="fp32"):
        return inputs
    for precision, reason in reasons.items():
        warnings.warn(f"{precision} is left out, because a step of the model fails in it: {reason}", stacklevel=2)
    full = "tf32" if all(node.device.accelerates("tf32") for node in inputs.cluster.nodes) else "fp32"
    return replace(inputs, precisions=tuple(p for p in precisions if p not in reasons) or (full,))


def _search(inputs: PlanningInputs, profiles: Profiles) -> SearchResult:
    with phase(f"searching for the fastest plan on {inputs.cluster.device_count:,} devices"):
        return search_with_offload(inputs, profiles)


def with_measured_operators(inputs: PlanningInputs, profiles: Profiles, budget_s: float = BUDGET_S) -> PlanningInputs:
    """Returns the inputs with a cluster in which the model's operators have been measured on this machine, with the
    batch that a rank gets if every device is a replica, in each memory layout and with all kernels of convolutions
    that the search considers. Returns the same inputs if the cluster is not this machine."""
    cluster, devices = inputs.cluster, inputs.cluster.device_count
    if not is_this_machine(cluster):
        return inputs
    for precision in inputs.precisions_to_try():
        axes = {"replicate": min(devices, inputs.global_batch)}
        profile = profiles.get(precision, "none")
        for compute in _image_kernels(profile, inputs):
            groups = {"axes": axes, "numerics": {"precision": precision}, "compute": compute}
            plan = Plan.model_validate(groups)
            cluster = measure_model_operators(cluster, profile, plan, inputs.global_batch, budget_s)
    return replace(inputs, cluster=cluster)


def _image_kernels(profile: ModelProfile, inputs: PlanningInputs) -> list[dict[str, str]]:
    """The memory layouts and kernels of convolutions that the search considers in plans with this profile, as fields of
    `Compute`."""
    if inputs.allow == "same" or not profile.has_convolutions:
        return [{}]
    if profile.precision != "fp32":
        return [{"layout": "channels_last"}]
    return [{}, *fp32_image_kernels(inputs)]


def _is_plain_replica(plan: Plan) -> bool:
    """Whether `with_measured_operators` measures the operators of this plan."""
    is_split = bool(plan.modules.splits) or plan.world_size > plan.axes.replicate
    return not is_split and plan.microbatches == 1 and plan.memory.recompute == "none"
