"""A reduction over an axis that is missing, or made twice."""

import torch

from meshwright.proof.causes.evidence import Evidence, Tensors, Verdict, listed, mean_of
from meshwright.proof.causes.scale import factor_of
from meshwright.proof.reference.experiments import added

# What ranks along an axis have of a gradient that the axis does not divide: means of other samples, or parts of a sum.
_SUMMED = ("tensor", "pipeline")


def missing_reduction(evidence: Evidence) -> Verdict | None:
    """Ranks along an axis have different copies of what they should have in common, and these combined are right: the
    mean over the replicate axis, the sum over the others. FSDP2 leaves each rank of the shard axis its own rows: those
    are the gradients of its own samples. Likewise for the loss, where the gradients are right."""
    if evidence.first.what == "loss" and not evidence.wrong:
        return _of_the_loss(evidence)
    if not evidence.gradients_are_wrong:
        return None
    found = [_along(evidence, axis, size) for axis, size in evidence.axes().items() if axis != "shard"]
    if "shard" in evidence.axes():
        found.append(_rows(evidence, evidence.axes()["shard"]))
    return min((verdict for verdict in found if verdict), key=lambda verdict: verdict.residual, default=None)


def _along(evidence: Evidence, axis: str, size: int) -> Verdict | None:
    line = evidence.line(axis, evidence.first.rank)
    copies = [evidence.gradients_on(witness.rank) for witness in line]
    names = [name for name in evidence.wrong if _is_common(evidence, name, axis)]
    apart = max((evidence.misfit(copy, names, copies[0]) for copy in copies[1:]), default=0.0)
    if not names or set(names) != set(evidence.wrong) or evidence.fits(apart):
        return None
    combined = mean_of(copies, 1.0 if axis in _SUMMED else 1 / size)
    misfit = evidence.misfit(evidence.expected.gradients, names, combined)
    if not evidence.fits(misfit):
        return None
    rule = "sum" if axis in _SUMMED else "mean"
    return Verdict(
        "missing_reduction",
        f"gradients are not reduced over the {axis} axis: its {size} ranks have different ones of {listed(names)}, and"
        f" their {rule} is right",
        misfit,
    )


def _rows(evidence: Evidence, size: int) -> Verdict | None:
    brought = evidence.lab.shares
    count = sum(each.count for each in brought)
    names = [name for name in evidence.wrong if name not in evidence.divided]
    if not brought or not count or not names:
        return None
    # Data rank = place along replicate × size of shard + place along shard; over replicate they are averaged.
    copies = len(brought) // size
    own: list[Tensors] = [
        mean_of(
            (added({}, brought[copy * size + place].gradients, len(brought) / count) for copy in range(copies)),
            1 / copies,
        )
        for place in range(size)
    ]
    rows = {name: _chunks([each.get(name) for each in own], size) for name in names}
    candidate = {name: value for name, value in rows.items() if value is not None}
    for weight, said in ((1.0, ""), (1 / size, f", divided by {size}")):
        misfit = evidence.misfit(added({}, candidate, weight), names)
        if evidence.fits(misfit):
            return Verdict(
                "missing_reduction",
                f"gradients are not reduced over the shard axis: of {listed(names)} each of its {size} ranks has the"
                f" rows that its own samples gave{said}",
                misfit,
            )
    return None


def _chunks(wholes: list[torch.Tensor | None], size: int) -> torch.Tensor | None:
    """Row by row as FSDP2 divides them, each rank's from its own."""
    known = [whole for whole in wholes if whole is not None]
    if len(known) < size or not known[0].dim():
        return None
    rows = known[0].shape[0]
    most = -(-rows // size)
    return torch.cat([whole[place * most : (place + 1) * most] for place, whole in enumerate(known)])


def _of_the_loss(evidence: Evidence) -> Verdict | None:
    for axis, size in evidence.axes().items():
        losses = [witness.loss for witness in evidence.line(axis, evidence.first.rank)]
        mean = sum(losses) / size
        expected = float(evidence.expected.loss)
        if max(losses) > min(losses) and evidence.fits(abs(mean - expected) / (abs(expected) or 1.0)):
            return Verdict(
                "missing_reduction",
                f"the loss is not reduced over the {axis} axis: its ranks report {listed(f'{x:.6g}' for x in losses)},"
                " and their mean is right, as the gradients are",
                abs(mean - expected),
            )
    return None


# ---- made twice


def doubled_reduction(evidence: Evidence) -> Verdict | None:
    """All gradients that an axis has in common, and no others, are off by its size (or, for tied weights, by the number
    of stages that hold them). Where an axis reduces all gradients this is a scale, and told as one."""
    if not evidence.gradients_are_wrong or not evidence.loss_is_right:
        return None
    factor = factor_of(evidence)
    if factor is None:
        return None
    scaled = added({}, evidence.expected.gradients, factor)
    for axis, size in evidence.axes().items():
        common = [name for name in evidence.expected.gradients if _is_common(evidence, name, axis)]
        rest = [name for name in evidence.expected.gradients if name not in common]
        times = (
            len(evidence.tied[evidence.wrong[0]]) if axis == "pipeline" and evidence.wrong[0] in evidence.tied else size
        )
        if not rest or not set(evidence.wrong) <= set(common) or not _is(evidence, factor, times):
            continue
        misfit = evidence.misfit(scaled, common)
        if not evidence.fits(misfit) or evidence.fits(evidence.misfit(scaled, rest)):
            continue
        what = "tied copies" if axis == "pipeline" else "weights that it does not divide"
        return Verdict(
            "doubled_reduction",
            f"gradients of the {len(common)} {what} ({listed(common)}) are {factor:.4g} times those of one device, the"
            f" others are right: they are reduced twice over the {axis} axis of {times}",
            misfit,
        )
    return None


def _is(evidence: Evidence, factor: float, times: int) -> bool:
    return any(evidence.fits(abs(factor / right - 1)) for right in (float(times), 1 / times))


def _is_common(evidence: Evidence, name: str, axis: str) -> bool:
    """Whether ranks along an axis have copies of the gradient."""
    if axis == "pipeline":
        return name in evidence.tied
    return evidence.divided.get(name) != axis
