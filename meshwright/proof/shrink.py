"""Makes a plan small enough for the available ranks: axes are divided by their factors, and none is reduced to one rank
while another can still be divided."""

from meshwright.plan import Axes, Pipeline, Plan

# The order in which axes are reduced to one rank: first those whose arithmetic is simplest, so that least is left
# unproven.
_REMOVAL_ORDER = ("replicate", "shard", "tensor", "pipeline")


def shrink(plan: Plan, ranks: int) -> tuple[Plan, str | None]:
    """A plan of at most `ranks` ranks, and a sentence that says how it was shrunk. If the plan fits, it is returned
    unchanged with None."""
    sizes = plan.axes.model_dump()
    while _product(sizes) > ranks:
        axis = _axis_to_divide(sizes)
        sizes[axis] = _smaller(axis, sizes[axis])
    if sizes == plan.axes.model_dump():
        return plan, None
    smaller = _with_axes(plan, Axes(**sizes))
    change = f"{_axes_text(plan)} to {_axes_text(smaller)}"
    return smaller, f"{change}: {ranks} ranks are available, the plan has {plan.world_size}"


def _axis_to_divide(sizes: dict[str, int]) -> str:
    """The largest axis that still has more than one rank when it is divided; if there is none, the first to remove."""
    divisible = [axis for axis in _REMOVAL_ORDER if _smaller(axis, sizes[axis]) > 1]
    if divisible:
        return max(divisible, key=lambda axis: sizes[axis])
    return next(axis for axis in _REMOVAL_ORDER if sizes[axis] > 1)


def _smaller(axis: str, size: int) -> int:
    """The size divided by its smallest factor: whatever 8 ranks can divide, 4 can. A prime number of data ranks becomes
    2, as samples can be divided by any number."""
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
    smaller = plan.model_copy(update={"axes": axes, "modules": modules, "pipeline": _pipeline(plan, axes.pipeline)})
    return Plan.model_validate(smaller.model_dump())  # raises if the groups do not fit together


def _pipeline(plan: Plan, ranks: int) -> Pipeline:
    """The pipeline with every n-th cut kept, so that a rank keeps its number of stages."""
    if ranks == plan.axes.pipeline:
        return plan.pipeline
    if ranks == 1:
        return Pipeline()
    stride = plan.axes.pipeline // ranks
    return plan.pipeline.model_copy(update={"cuts": plan.pipeline.cuts[stride - 1 :: stride]})


def _axes_text(plan: Plan) -> str:
    return " × ".join(f"{name} {size}" for name, size in plan.axes.model_dump().items() if size > 1) or "one rank"


def _product(sizes: dict[str, int]) -> int:
    product = 1
    for size in sizes.values():
        product *= size
    return product
