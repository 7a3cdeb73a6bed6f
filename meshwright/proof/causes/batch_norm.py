"""The cause `batch_norm`: BatchNorm normalized over other samples than the plan says, or its running statistics were
updated from other samples."""

from meshwright.proof.causes.evidence import Evidence, Verdict
from meshwright.proof.compare.errors import layer_name, layer_scales, scaled_error
from meshwright.proof.reference.experiments import ExperimentResult
from meshwright.proof.reference.groups import Grouping

_GROUPING_TEXT: dict[Grouping, str] = {
    "local": "each microbatch of each data rank by itself",
    "synchronized": "each microbatch of all data ranks together",
    "whole": "the whole global batch",
}


def batch_norm(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if one device gets the ranks' gradients when it normalizes over other groups of samples, or by
    its running statistics. There is also one if loss and gradients are right, but a buffer of a BatchNorm layer
    differs."""
    layers = evidence.experiments.batch_statistics_layers
    if not layers:
        return None
    if evidence.gradients_differ:
        return _other_groups(evidence)
    first = evidence.difference
    if first.what == "buffer" and first.step and layer_name(first.parameter or "") in layers:
        return _running_statistics(evidence)
    return None


def _other_groups(evidence: Evidence) -> Verdict | None:
    experiments, plan = evidence.experiments, evidence.reference_plan or evidence.plan
    is_proof = plan is evidence.plan  # otherwise two runs are compared
    expected = _GROUPING_TEXT[experiments.grouping if is_proof else plan.numerics.batch_norm]
    if plan.batch_parts == 1:
        expected = _GROUPING_TEXT["whole"]
    results: dict[str, ExperimentResult] = {}
    if evidence.plan.batch_parts > 1:
        # When two runs are compared, the reference run grouped samples by its own plan, so every grouping under this
        # plan is a different one.
        groupings = [grouping for grouping in _GROUPING_TEXT if grouping != experiments.grouping or not is_proof]
        results = {_GROUPING_TEXT[grouping]: experiments.run(grouping) for grouping in groupings}
    results["nothing, but by its running statistics"] = experiments.run(frozen_statistics=True)
    expected_by = "the plan says" if is_proof else f"the first run ({plan.summary()})"
    for text, result in results.items():
        misfit = evidence.misfit(result.gradients)
        if evidence.fits(misfit):
            return Verdict("batch_norm", f"BatchNorm normalized over {text}; {expected_by}: {expected}", misfit)
    return None


def _running_statistics(evidence: Evidence) -> Verdict:
    """Returns a verdict, which names the data rank whose samples updated the running statistics, if one explains
    them."""
    first = evidence.difference
    explanation = (
        f"loss and gradients of step {evidence.step} are right, but {first.parameter} is {first.error:.2e} off"
    )
    ranks = range(1, evidence.plan.data_ranks) if evidence.experiments.grouping == "local" else ()
    for rank in ranks:
        misfit = largest_buffer_error(evidence, evidence.experiments.run(statistics_rank=rank))
        if evidence.fits(misfit):
            return Verdict(
                "batch_norm", f"{explanation}: it learnt from data rank {rank}'s samples, not from 0's", misfit
            )
    return Verdict("batch_norm", explanation)


def largest_buffer_error(evidence: Evidence, result: ExperimentResult) -> float:
    """Returns the largest error of the recorded buffers, compared with those of an experiment."""
    recorded, rank = evidence.recorded, evidence.difference.rank
    state = {**recorded.state, **recorded.differing_states.get(rank, {})}
    scales = layer_scales(result.buffers)
    return max(scaled_error(state.get(name), value, scales[name] or 1.0) for name, value in result.buffers.items())
