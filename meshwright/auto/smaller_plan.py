"""The fastest plan that needs less memory than one that did not fit."""

from dataclasses import replace

from meshwright.auto.inputs import planning_inputs
from meshwright.cluster.cluster import Cluster
from meshwright.errors import InputError
from meshwright.planner.offload import search_with_offload as search
from meshwright.planner.search_result import PricedPlan
from meshwright.simulator.predict import Prediction
from meshwright.train.job_parts import JobParts

_LESS = 0.9  # of the memory that was predicted for the plan that did not fit


def plan_with_less_memory(parts: JobParts, cluster: Cluster, prediction: Prediction) -> PricedPlan | None:
    """Returns the fastest plan of the job whose predicted memory is at least a tenth below `prediction`; None if there
    is none."""
    inputs, profiles = planning_inputs(parts, cluster, even_shares=False)
    limit_bytes = _LESS * prediction.memory.device_bytes
    margin = max(inputs.memory_margin, 1 - limit_bytes / inputs.device.memory_bytes)
    try:
        return search(replace(inputs, memory_margin=margin), profiles).ranked[0]
    except (InputError, IndexError):
        return None
