"""The search among plans that keep optimizer state, or all shards, in CPU memory (`memory.offload`), on GPUs and where
`allow` is not `same`. Such plans are searched for only if they can be the answer:

    none fits     no plan without offload fits: first `optimizer`, then `parameters`, until a plan fits
    it may win    the best plan spends more time on recomputation and communication than the copies and the step on the
                  CPU would take at least, if all ranks divide them (`_least_cost_s`): plans with `optimizer`, of which
                  the best is compared with it (preference.py)
"""

from dataclasses import replace

from meshwright.planner.inputs import NoPlanFits, PlanningInputs
from meshwright.planner.preference import preferred
from meshwright.planner.profiles import Profiles
from meshwright.planner.search import search
from meshwright.planner.search_result import PricedPlan, SearchResult
from meshwright.simulator.offload import host_step_s, optimizer_copies_s

_RECOMPUTED = {"none": 0.0, "selective": 0.0, "full": 0.25}  # share of compute that is a repeated forward pass


def search_with_offload(inputs: PlanningInputs, profiles: Profiles) -> SearchResult:
    """Returns the best plans, with tensors in CPU memory where no other plan fits or where that is faster. Raises
    `NoPlanFits`, an `InputError`, if none fits at all."""
    may_offload = inputs.cluster.kind == "cuda" and inputs.allow != "same"
    can_copy = all(node.device.host_bandwidth_bytes_per_s for node in inputs.cluster.nodes)
    if not may_offload or not can_copy or "memory.offload" in inputs.constraints.fixed:
        return search(inputs, profiles)
    try:
        result = search(inputs, profiles)
    except NoPlanFits as without_offload:
        try:
            return search(replace(inputs, offload="optimizer"), profiles)
        except NoPlanFits:
            try:
                return search(replace(inputs, offload="parameters"), profiles)
            except NoPlanFits as error:
                raise (error if error.lacks_memory else without_offload) from None
    best = result.ranked[0]
    if _least_cost_s(best, result, inputs) >= _avoidable_s(best):
        return result
    try:
        offloaded = search(replace(inputs, offload="optimizer"), profiles)
    except NoPlanFits:
        return result
    winner = offloaded.ranked[0]
    if not preferred([(priced.plan, priced.prediction) for priced in (best, winner)]):
        return result
    others = sorted((*offloaded.ranked[1:], *result.ranked), key=lambda priced: priced.prediction.step_s)
    return replace(
        offloaded,
        ranked=(winner, *others[: inputs.top - 1]),
        simulated=(*offloaded.simulated, *result.simulated),
        without_offload=best,
    )


def _avoidable_s(best: PricedPlan) -> float:
    """Seconds of the best plan's step that a plan with more memory could save: all but computing once."""
    compute_s = best.prediction.breakdown["compute"] * (1 - _RECOMPUTED[best.plan.memory.recompute])
    return best.prediction.step_s - compute_s


def _least_cost_s(best: PricedPlan, result: SearchResult, inputs: PlanningInputs) -> float:
    """A lower bound of what `offload: optimizer` adds to a step: each rank updates an equal share of the weights."""
    optimizer = inputs.optimizer.fused() if inputs.can_fuse_optimizer else inputs.optimizer
    trained = sum(parameter.bytes for parameter in result.summary.profile.parameters if parameter.trainable)
    share = trained / inputs.cluster.device_count
    return optimizer_copies_s(share, inputs.device) + host_step_s(share, optimizer, best.plan, inputs.cluster)
