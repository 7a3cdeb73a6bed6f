"""BatchNorm statistics: over other samples than the plan says, or running ones that learnt otherwise."""

from meshwright.proof.causes.evidence import Evidence, Verdict
from meshwright.proof.compare.errors import error_of, layer_of, layer_scales
from meshwright.proof.reference.experiments import Outcome
from meshwright.proof.reference.groups import Grouping

_WORDS: dict[Grouping, str] = {
    "local": "each microbatch of each data rank by itself",
    "synchronized": "each microbatch of all data ranks together",
    "whole": "the whole global batch",
}


def batch_norm(evidence: Evidence) -> Verdict | None:
    """One device that normalizes over other groups of samples, or by its running statistics, computes what the ranks
    have. Or all is right but for the buffers of such a layer."""
    layers = evidence.lab.batch_layers
    if not layers:
        return None
    if evidence.gradients_are_wrong:
        return _other_groups(evidence)
    if evidence.first.what == "buffer" and evidence.first.step and layer_of(evidence.first.parameter or "") in layers:
        return _running(evidence)
    return None


def _other_groups(evidence: Evidence) -> Verdict | None:
    lab, plan = evidence.lab, evidence.reference or evidence.plan
    right = _WORDS[lab.kind if plan is evidence.plan else plan.numerics.batch_norm]
    if plan.shares == 1:
        right = _WORDS["whole"]
    tried: dict[str, Outcome] = {}
    if evidence.plan.shares > 1:
        # Another run's groups were other ones under any plan but this.
        tried = {_WORDS[kind]: lab.run(kind) for kind in _WORDS if kind != lab.kind or plan is not evidence.plan}
    tried["nothing, but by its running statistics"] = lab.run(frozen_statistics=True)
    says = "the plan says" if plan is evidence.plan else f"the first run ({plan.summary()})"
    for words, outcome in tried.items():
        misfit = evidence.misfit(outcome.gradients)
        if evidence.fits(misfit):
            return Verdict("batch_norm", f"BatchNorm normalized over {words}; {says}: {right}", misfit)
    return None


def _running(evidence: Evidence) -> Verdict:
    """Whose samples they learnt from, where that explains them."""
    name = evidence.first.parameter or ""
    told = f"loss and gradients of step {evidence.step} are right, but {name} is {evidence.first.error:.2e} off"
    ranks = range(1, evidence.plan.data_ranks) if evidence.lab.kind == "local" else ()
    for rank in ranks:
        misfit = _buffers_off(evidence, evidence.lab.run(learns=rank))
        if evidence.fits(misfit):
            return Verdict("batch_norm", f"{told}: it learnt from data rank {rank}'s samples, not from 0's", misfit)
    return Verdict("batch_norm", told)


def _buffers_off(evidence: Evidence, outcome: Outcome) -> float:
    found = {**evidence.found.state, **evidence.found.state_of.get(evidence.first.rank, {})}
    scales = layer_scales(outcome.buffers)
    return max(error_of(found.get(name), value, scales[name] or 1.0) for name, value in outcome.buffers.items())
