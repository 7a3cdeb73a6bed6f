"""Makes a plan small enough for the available ranks: axes are divided by their factors, and none is reduced to one rank
while another can still be divided."""

from math import gcd, prod

from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes, Pipeline, Shares

# The order in which axes are reduced to one rank. Axes with the simplest arithmetic come first, because the proof then
# leaves out the least.
_REMOVAL_ORDER = ("replicate", "shard", "context", "tensor", "pipeline")


def shrink(plan: Plan, ranks: int) -> tuple[Plan, str | None]:
    """Returns a plan of at most `ranks` ranks, and a sentence that says how it was shrunk. A plan that fits is returned
    unchanged, with None instead of the sentence."""
    sizes = plan.axes.model_dump()
    while prod(sizes[axis] for axis in _REMOVAL_ORDER) > ranks:
        axis = _axis_to_divide(sizes)
        sizes[axis] = _smaller(axis, sizes[axis])
    if sizes == plan.axes.model_dump():
        return plan, None
    sizes["expert"] = gcd(plan.axes.expert, sizes["replicate"] * sizes["shard"])
    smaller = _with_axes(plan, Axes(**sizes))
    change = f"{_axes_text(plan)} to {_axes_text(smaller)}"
    return smaller, f"{change}: {ranks} ranks are available, the plan has {plan.world_size}"


def _axis_to_divide(sizes: dict[str, int]) -> str:
    """Returns the name of the largest axis that keeps more than one rank when it is divided. If there is no such axis,
    returns the first axis of `_REMOVAL_ORDER` with more than one rank, which is then reduced to one."""
    divisible = [axis for axis in _REMOVAL_ORDER if _smaller(axis, sizes[axis]) > 1]
    if divisible:
        return max(divisible, key=lambda axis: sizes[axis])
    return next(axis for axis in _REMOVAL_ORDER if sizes[axis] > 1)


def _smaller(axis: str, size: int) -> int:
    """Returns the size divided by its smallest prime factor, because what 8 ranks can divide, 4 ranks can divide, too.
    A prime size becomes 1; on the axes replicate and shard a prime size above 2 becomes 2, because samples can be
    divided by any number."""
    factor = next((factor for factor in range(2, size) if size % factor == 0), size)
    return 2 if factor == size > 2 and axis in ("replicate", "shard") else max(1, size // factor)


def _with_axes(plan: Plan, axes: Axes) -> Plan:
    modules = plan.modules
    if axes.replicate == 1:
        splits = {name: split for name, split in modules.splits.items() if split.axis != "replicate"}
        modules = modules.model_copy(update={"splits": splits})
    # A branch on a rank that no longer exists moves to one that does.
    branches = {name: rank % axes.tensor for name, rank in modules.branches.items()} if axes.tensor > 1 else {}
    modules = modules.model_copy(update={"branches": branches})
    pipeline, shares = _pipeline(plan, axes.pipeline), _shares(plan, axes)
    smaller = plan.model_copy(update={"axes": axes, "modules": modules, "pipeline": pipeline, "shares": shares})
    return Plan.model_validate(smaller.model_dump())  # raises if the plan's settings do not fit together


def _pipeline(plan: Plan, ranks: int) -> Pipeline:
    """Returns the pipeline settings for fewer pipeline ranks. Every n-th cut is kept, where n is the factor by which
    the number of ranks shrinks. Therefore each rank keeps its number of stages."""
    if ranks == plan.axes.pipeline:
        return plan.pipeline
    if ranks == 1:
        return Pipeline()
    stride = plan.axes.pipeline // ranks
    return plan.pipeline.model_copy(update={"cuts": plan.pipeline.cuts[stride - 1 :: stride]})


def _shares(plan: Plan, axes: Axes) -> Shares:
    """Returns the shares for fewer ranks: those of every n-th rank, so that unequal ones stay unequal."""
    samples = _of_every_nth_rank(plan.shares.samples, axes.replicate * axes.shard)
    shards = _of_every_nth_rank(plan.shares.shards, axes.shard) if axes.shard > 1 else ()
    return plan.shares.model_copy(update={"samples": samples, "shards": shards})


def _of_every_nth_rank(shares: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    return shares[:: max(1, len(shares) // ranks)][:ranks]


def _axes_text(plan: Plan) -> str:
    return " × ".join(f"{name} {size}" for name, size in plan.axes.factors.items()) or "one rank"
