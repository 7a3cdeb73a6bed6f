"""The summary of a model that a search is based on."""

from functools import partial

from meshwright.cluster.cluster import Device
from meshwright.planner.branch_placement import find_branch_groups
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.model_summary import ModelSummary
from meshwright.planner.profiles import Profiles


def summarize_model(inputs: PlanningInputs, profiles: Profiles, precision: str) -> ModelSummary:
    """Returns the summary of the model in this precision, on the fastest device, so that bounds are lower bounds."""
    device, cores = inputs.fastest_device(precision), inputs.cluster.cores if inputs.cluster.kind == "cpu" else 1
    fixed_cuts = inputs.constraints.fixed.get("pipeline.cuts") or None
    key = (precision, id(device), cores, fixed_cuts)  # the summary holds the device, so that no other gets its id
    summary = profiles.once(key, lambda: _summary(profiles, precision, device, cores, fixed_cuts))
    return summary.for_another_search()


def _summary(
    profiles: Profiles, precision: str, device: Device, cores: int, fixed_cuts: tuple[str, ...] | None
) -> ModelSummary:
    profile = profiles.get(precision, "none")
    summary = ModelSummary(profile, device, cores, fixed_cuts=fixed_cuts, trace=partial(profiles.get, precision))
    if summary.has_convolutions and precision != "fp32":  # for fp32, compute_variants.py predicts both layouts
        summary.memory_layout = "channels_last"
    structure = summary.structure
    if structure is not None and structure.branches:
        calls = profiles.module_calls(evaluating=structure.found_in_evaluation)
        summary.branch_groups = find_branch_groups(structure, profile.parameters, calls)
    return summary
