"""The causes `missing_reduction` and `doubled_reduction`: gradients (or the loss) are not reduced over an axis of the
mesh, or are reduced twice."""

import torch

from meshwright.proof.causes.evidence import Evidence, Tensors, Verdict, join_names, weighted_sum
from meshwright.proof.causes.scale import common_factor
from meshwright.proof.reference.experiments import add_scaled

# Ranks along these axes compute gradients that must be summed, if the axis does not split the parameter. Ranks along
# the other axes compute means over different samples, which must be averaged.
_SUMMED = ("tensor", "pipeline")


def missing_reduction(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if the ranks along an axis have different copies of gradients that should be equal, and the
    copies combined are right. Copies are combined by the mean over the replicate axis, and by the sum over the tensor
    and pipeline axes. On the shard axis, where FSDP2 gives each rank its own rows, a reduction is missing if a rank's
    rows are those of the gradients of its own samples only. If only the loss differs, the ranks' losses are checked
    instead."""
    if evidence.difference.what == "loss" and not evidence.differing_names:
        return _missing_for_loss(evidence)
    if not evidence.gradients_differ:
        return None
    axes = evidence.used_axes()
    verdicts = [_missing_along(evidence, axis, size) for axis, size in axes.items() if axis != "shard"]
    if "shard" in axes:
        verdicts.append(_missing_for_rows(evidence, axes["shard"]))
    return min((verdict for verdict in verdicts if verdict), key=lambda verdict: verdict.residual, default=None)


def _missing_along(evidence: Evidence, axis: str, size: int) -> Verdict | None:
    ranks = evidence.ranks_along(axis, evidence.difference.rank)
    copies = [evidence.gradients_on(observation.rank) for observation in ranks]
    names = [name for name in evidence.differing_names if _is_common(evidence, name, axis)]
    largest_difference = max((evidence.misfit(copy, names, copies[0]) for copy in copies[1:]), default=0.0)
    if not names or set(names) != set(evidence.differing_names) or evidence.fits(largest_difference):
        return None
    combined = weighted_sum(copies, 1.0 if axis in _SUMMED else 1 / size)
    misfit = evidence.misfit(evidence.expected.gradients, names, combined)
    if not evidence.fits(misfit):
        return None
    rule = "sum" if axis in _SUMMED else "mean"
    return Verdict(
        "missing_reduction",
        f"gradients are not reduced over the {axis} axis: its {size} ranks have different ones of {join_names(names)},"
        f" and their {rule} is right",
        misfit,
    )


def _missing_for_rows(evidence: Evidence, size: int) -> Verdict | None:
    """Returns a verdict if each rank of the shard axis has its rows of the gradients of its own samples only."""
    contributions = evidence.experiments.rank_contributions
    count = sum(contribution.target_count for contribution in contributions)
    names = [name for name in evidence.differing_names if name not in evidence.split_axes]
    if not contributions or not count or not names:
        return None
    # Data rank = coordinate along replicate × size of shard + coordinate along shard. Over replicate, gradients are
    # averaged.
    replicas = len(contributions) // size
    scaled = [add_scaled({}, contribution.gradient_sums, len(contributions) / count) for contribution in contributions]
    own_gradients: list[Tensors] = [
        weighted_sum((scaled[replica * size + coordinate] for replica in range(replicas)), 1 / replicas)
        for coordinate in range(size)
    ]
    rows = {name: _own_rows([gradients.get(name) for gradients in own_gradients], size) for name in names}
    candidate = {name: value for name, value in rows.items() if value is not None}
    for weight, division in ((1.0, ""), (1 / size, f", divided by {size}")):
        misfit = evidence.misfit(add_scaled({}, candidate, weight), names)
        if evidence.fits(misfit):
            return Verdict(
                "missing_reduction",
                f"gradients are not reduced over the shard axis: of {join_names(names)} each of its {size} ranks has"
                f" the rows that its own samples gave{division}",
                misfit,
            )
    return None


def _own_rows(gradients: list[torch.Tensor | None], size: int) -> torch.Tensor | None:
    """Returns one tensor in which each rank's rows, as FSDP2 divides them, come from that rank's gradient. Returns None
    if a rank has no gradient, or if the gradient is a scalar."""
    present = [gradient for gradient in gradients if gradient is not None]
    if len(present) < size or not present[0].dim():
        return None
    rows_per_rank = -(-present[0].shape[0] // size)
    return torch.cat(
        [gradient[rank * rows_per_rank : (rank + 1) * rows_per_rank] for rank, gradient in enumerate(present)]
    )


def _missing_for_loss(evidence: Evidence) -> Verdict | None:
    for axis, size in evidence.used_axes().items():
        losses = [observation.loss for observation in evidence.ranks_along(axis, evidence.difference.rank)]
        mean = sum(losses) / size
        expected = float(evidence.expected.loss)
        if max(losses) > min(losses) and evidence.fits(abs(mean - expected) / (abs(expected) or 1.0)):
            reported = join_names(f"{loss:.6g}" for loss in losses)
            return Verdict(
                "missing_reduction",
                f"the loss is not reduced over the {axis} axis: its ranks report {reported}, and their mean is right,"
                " as the gradients are",
                abs(mean - expected),
            )
    return None


# ---- made twice


def doubled_reduction(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if exactly those gradients of which the ranks of an axis have copies are multiplied or divided
    by the size of the axis (for tied parameters: by the number of stages that hold them). If the axis reduces all
    gradients, there is no verdict here, because `scaled` explains this."""
    if not evidence.gradients_differ or not evidence.loss_is_right:
        return None
    factor = common_factor(evidence)
    if factor is None:
        return None
    scaled = add_scaled({}, evidence.expected.gradients, factor)
    for axis, size in evidence.used_axes().items():
        common = [name for name in evidence.expected.gradients if _is_common(evidence, name, axis)]
        others = [name for name in evidence.expected.gradients if name not in common]
        times = _reduced_ranks(evidence, axis, size)
        if not others or not set(evidence.differing_names) <= set(common) or not _is(evidence, factor, times):
            continue
        misfit = evidence.misfit(scaled, common)
        if not evidence.fits(misfit) or evidence.fits(evidence.misfit(scaled, others)):
            continue
        kind = "tied copies" if axis == "pipeline" else "weights that it does not divide"
        return Verdict(
            "doubled_reduction",
            f"gradients of the {len(common)} {kind} ({join_names(common)}) are {factor:.4g} times those of one device,"
            f" the others are right: they are reduced twice over the {axis} axis of {times}",
            misfit,
        )
    return None


def _reduced_ranks(evidence: Evidence, axis: str, size: int) -> int:
    """Returns the number of ranks whose gradients a reduction over the axis adds up."""
    name = evidence.differing_names[0]
    return len(evidence.tied_stages[name]) if axis == "pipeline" and name in evidence.tied_stages else size


def _is(evidence: Evidence, factor: float, times: int) -> bool:
    """Whether the factor is this number or its inverse."""
    return any(evidence.fits(abs(factor / right - 1)) for right in (float(times), 1 / times))


def _is_common(evidence: Evidence, name: str, axis: str) -> bool:
    """Whether the ranks along the axis should have equal copies of this gradient."""
    if axis == "pipeline":
        return name in evidence.tied_stages
    return evidence.split_axes.get(name) != axis
