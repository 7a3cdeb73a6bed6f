"""The search among plans that keep optimizer state, or all shards, in CPU memory (`memory.offload`), on GPUs and where
`allow` is not `same`. If no plan fits without, plans with `optimizer` are searched, then those with `parameters`. Where
plans fit, `optimizer` is a field like others (polish/neighbours.py)."""

from dataclasses import replace

from meshwright.errors import InputError
from meshwright.planner.inputs import NoPlanFits, PlanningInputs
from meshwright.planner.profiles import Profiles
from meshwright.planner.search import search
from meshwright.planner.search_result import SearchResult


def search_with_offload(inputs: PlanningInputs, profiles: Profiles) -> SearchResult:
    """Returns the best plans, with tensors in CPU memory where no other plan fits or where that is faster. Raises
    `NoPlanFits`, an `InputError`, if none fits at all."""
    may_offload = inputs.cluster.kind == "cuda" and inputs.allow != "same"
    can_copy = all(node.device.host_bandwidth_bytes_per_s for node in inputs.cluster.nodes)
    if not may_offload or not can_copy or "memory.offload" in inputs.constraints.fixed:
        return search(inputs, profiles)
    try:
        return search(inputs, profiles)
    except NoPlanFits as without_offload:
        try:
            return search(replace(inputs, offload="optimizer"), profiles)
        except NoPlanFits:
            try:
                return search(replace(inputs, offload="parameters"), profiles)
            except InputError as error:  # also where one device has no other with which it could divide parameters
                lacks_memory = isinstance(error, NoPlanFits) and error.lacks_memory
                raise (error if lacks_memory else without_offload) from None
