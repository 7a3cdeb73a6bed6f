"""The causes `lost_tokens` and `expert_gradients`: tokens are lost or doubled on their way to the experts of other
ranks, or the gradients of experts are averaged over too many or too few ranks."""

from torch import Tensor

from meshwright.proof.causes.evidence import Evidence, Tensors, Verdict, join_names, weighted_sum
from meshwright.proof.causes.scale import common_factor

AXIS = "expert"


def lost_tokens(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if the experts of all ranks together did not compute as many rows as were sent to them."""
    layers = {name for observation in evidence.observations for name in observation.expert_rows or {}}
    for layer in sorted(layers):
        rows = [(observation.expert_rows or {}).get(layer, (0, 0)) for observation in evidence.observations]
        routed, computed = (sum(of_rank[number] for of_rank in rows) for number in (0, 1))
        if routed != computed:
            count = abs(routed - computed)
            what = "lost" if computed < routed else "doubled"
            return Verdict(
                "lost_tokens",
                f"{count} of {routed} rows were {what} on their way to the experts of {layer}, which computed"
                f" {computed}",
            )
    return None


def expert_gradients(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if only the gradients of experts differ, and are means over other ranks than those that hold
    copies of the expert: over each copy alone, over other experts, too, or divided by a wrong number of ranks."""
    names = [name for name in evidence.differing_names if evidence.split_axes.get(name) == AXIS]
    if not evidence.gradients_differ or not names or len(names) < len(evidence.differing_names):
        return None
    for check in (_copies_alone, _over_other_experts, _divided_by_another_number):
        verdict = check(evidence, names)
        if verdict is not None:
            return verdict
    return None


def _copies_alone(evidence: Evidence, names: list[str]) -> Verdict | None:
    """The copies of an expert have different gradients, and their mean is right."""
    ranks = evidence.ranks_along("replicate", evidence.difference.rank)
    copies = [evidence.gradients_on(observation.rank) for observation in ranks]
    if all(evidence.fits(evidence.misfit(copy, names, copies[0])) for copy in copies[1:]):
        return None
    misfit = evidence.misfit(evidence.expected.gradients, names, weighted_sum(copies, 1 / len(copies)))
    if not evidence.fits(misfit):
        return None
    return Verdict(
        "expert_gradients",
        f"the gradients of {join_names(names)} are averaged over too few ranks: the {len(copies)} ranks that hold"
        " copies of these experts have different ones, and their mean is right",
        misfit,
    )


def _over_other_experts(evidence: Evidence, names: list[str]) -> Verdict | None:
    """The gradient of an expert is the mean over the experts at the same place on all ranks of the axis."""
    ranks = evidence.plan.axes.expert
    expected = evidence.expected.gradients
    candidate: Tensors = {name: _mean_over_ranks(expected[name], ranks) for name in names if name in expected}
    misfit = evidence.misfit(candidate, names)
    if not evidence.fits(misfit):
        return None
    return Verdict(
        "expert_gradients",
        f"the gradients of {join_names(names)} are averaged over too many ranks: also over the {ranks} ranks of the"
        " expert axis, which hold different experts",
        misfit,
    )


def _mean_over_ranks(gradient: Tensor, ranks: int) -> Tensor:
    of_ranks = gradient.unflatten(0, (ranks, -1))
    return of_ranks.mean(0, keepdim=True).expand_as(of_ranks).flatten(0, 1)


def _divided_by_another_number(evidence: Evidence, names: list[str]) -> Verdict | None:
    factor = common_factor(evidence)
    if factor is None:
        return None
    sizes = {"expert": evidence.plan.axes.expert, "data": evidence.plan.data_ranks}
    for kind, size in sizes.items():
        for right, what in ((float(size), "few"), (1 / size, "many")):
            if size > 1 and evidence.fits(abs(factor / right - 1)):
                return Verdict(
                    "expert_gradients",
                    f"the gradients of {join_names(names)} are {factor:.4g} times those of one device, and all others"
                    f" are right: they are averaged over too {what} ranks, by a factor of the {size} {kind} ranks",
                )
    return None
