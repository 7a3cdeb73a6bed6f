"""The cause `scaled`: gradients are multiplied by a constant. Says which of the plan's sizes the constant equals."""

from meshwright.plan import Plan
from meshwright.proof.causes.evidence import Evidence, Verdict, join_names
from meshwright.proof.reference.experiments import add_scaled


def scaled(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if all gradients that differ equal the right ones times one constant, which is found by least
    squares over all their elements. The loss must be right, or multiplied by the same constant."""
    if not evidence.gradients_differ:
        return None
    factor = common_factor(evidence)
    if factor is None:
        return None
    if not evidence.loss_is_right and not evidence.loss_fits(factor * float(evidence.expected.loss)):
        return None
    names = evidence.differing_names
    misfit = evidence.misfit(add_scaled({}, evidence.expected.gradients, factor), names)
    are_all = len(names) == len(evidence.expected.gradients)
    which = "all gradients" if are_all else f"the gradients of {join_names(names)}"
    on_rank = f" on rank {evidence.difference.rank}" if evidence.difference.rank else ""
    loss = "" if evidence.loss_is_right else ", and so is the loss"
    return Verdict(
        "scaled",
        f"{which}{on_rank} are {factor:.7g} times those of one device{loss}: {_describe_factor(factor, evidence)}",
        misfit,
    )


def common_factor(evidence: Evidence) -> float | None:
    """Returns the constant that all differing gradients are multiplied by; None if there is no such constant. Also None
    if the differing gradients have a single element in all, because one number is always a multiple of another."""
    expected = evidence.expected.gradients
    names = [name for name in evidence.differing_names if name in evidence.gradients and name in expected]
    if len(names) < len(evidence.differing_names):
        return None
    pairs = [(evidence.gradients[name].double(), expected[name].double()) for name in names]
    if any(actual.shape != right.shape for actual, right in pairs) or sum(right.numel() for _, right in pairs) < 2:
        return None
    squares = sum(float(right.square().sum()) for _, right in pairs)
    if not squares:
        return None
    factor = sum(float((actual * right).sum()) for actual, right in pairs) / squares
    if not factor or not evidence.fits(evidence.misfit(add_scaled({}, expected, factor), names)):
        return None
    return factor


def _describe_factor(factor: float, evidence: Evidence) -> str:
    """Returns a text that names the sizes of the plan, or products of two sizes, that equal the factor or its
    inverse."""
    sizes = _plan_sizes(evidence.plan)
    products = {
        f"{name} × {other_name}": size * other_size
        for number, (name, size) in enumerate(sizes.items())
        for other_name, other_size in list(sizes.items())[number + 1 :]
    }
    for candidates in (sizes, products):
        for inverse in (False, True):
            fitting = [
                name
                for name, size in candidates.items()
                if evidence.fits(abs(factor * (1 / size if not inverse else size) - 1))
            ]
            if fitting:
                return f"{'one divided by ' if inverse else ''}{' or '.join(fitting)}"
    return "no size of the plan is this factor"


def _plan_sizes(plan: Plan) -> dict[str, int]:
    """Returns the numbers of a plan that gradients may be multiplied or divided by, each under a text that describes
    it."""
    axes = {f"the size of the {name} axis": size for name, size in plan.axes.model_dump().items() if size > 1}
    pipelined, accumulated = plan.pipeline.microbatches, plan.memory.accumulation
    sizes = dict(axes)
    if plan.axes.replicate > 1 and plan.axes.shard > 1:
        sizes["the number of data ranks"] = plan.data_ranks
    if len(axes) > 1:
        sizes["the number of ranks"] = plan.world_size
    if accumulated > 1:
        sizes["the number of accumulated microbatches"] = accumulated
    if pipelined > 1:
        sizes["the number of the pipeline's microbatches"] = pipelined
    if accumulated > 1 and pipelined > 1:
        sizes["the number of microbatches"] = plan.microbatches
    return sizes
