"""Gradients scaled by a constant, and which of the plan's sizes that constant is."""

from meshwright.plan import Plan
from meshwright.proof.causes.evidence import Evidence, Verdict, listed
from meshwright.proof.reference.experiments import added


def scaled(evidence: Evidence) -> Verdict | None:
    """All gradients that differ are one constant times the right ones: least squares over all their elements leave
    nothing. The loss is right, or off by that constant, too."""
    if not evidence.gradients_are_wrong:
        return None
    factor = factor_of(evidence)
    if factor is None:
        return None
    if not evidence.loss_is_right and not evidence.loss_fits(factor * float(evidence.expected.loss)):
        return None
    names = evidence.wrong
    misfit = evidence.misfit(added({}, evidence.expected.gradients, factor), names)
    which = "all gradients" if len(names) == len(evidence.expected.gradients) else f"the gradients of {listed(names)}"
    where = f" on rank {evidence.first.rank}" if evidence.first.rank else ""
    loss = "" if evidence.loss_is_right else ", and so is the loss"
    return Verdict(
        "scaled",
        f"{which}{where} are {factor:.7g} times those of one device{loss}: {named(factor, evidence)}",
        misfit,
    )


def factor_of(evidence: Evidence) -> float | None:
    """The constant, where there is one. A single number is always some constant times another: it says nothing."""
    names = [name for name in evidence.wrong if name in evidence.gradients and name in evidence.expected.gradients]
    if len(names) < len(evidence.wrong):
        return None
    pairs = [(evidence.gradients[name].double(), evidence.expected.gradients[name].double()) for name in names]
    if any(found.shape != right.shape for found, right in pairs) or sum(right.numel() for _, right in pairs) < 2:
        return None
    square = sum(float(right.square().sum()) for _, right in pairs)
    if not square:
        return None
    factor = sum(float((found * right).sum()) for found, right in pairs) / square
    if not factor or not evidence.fits(evidence.misfit(added({}, evidence.expected.gradients, factor), names)):
        return None
    return factor


def named(factor: float, evidence: Evidence) -> str:
    """The sizes that are this factor or its inverse, alone or two of them multiplied."""
    sizes = _sizes(evidence.plan)
    pairs = {
        f"{one} × {other}": size * times
        for number, (one, size) in enumerate(sizes.items())
        for other, times in list(sizes.items())[number + 1 :]
    }
    for words in (sizes, pairs):
        for inverse in (False, True):
            fitting = [
                name
                for name, size in words.items()
                if evidence.fits(abs(factor * (1 / size if not inverse else size) - 1))
            ]
            if fitting:
                return f"{'one divided by ' if inverse else ''}{' or '.join(fitting)}"
    return "no size of the plan is this factor"


def _sizes(plan: Plan) -> dict[str, int]:
    axes = {f"the size of the {name} axis": size for name, size in plan.axes.model_dump().items() if size > 1}
    stages, rounds = plan.pipeline.microbatches, plan.memory.accumulation
    found = dict(axes)
    if plan.axes.replicate > 1 and plan.axes.shard > 1:
        found["the number of data ranks"] = plan.data_ranks
    if len(axes) > 1:
        found["the number of ranks"] = plan.world_size
    if rounds > 1:
        found["the number of accumulated microbatches"] = rounds
    if stages > 1:
        found["the number of the pipeline's microbatches"] = stages
    if rounds > 1 and stages > 1:
        found["the number of microbatches"] = plan.microbatches
    return found
