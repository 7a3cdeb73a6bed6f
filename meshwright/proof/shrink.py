"""A plan made small enough for the ranks there are: axes lose factors, but none that is used is lost before it must."""

from meshwright.plan import Axes, Pipeline, Plan

# An axis that must go altogether: first those whose arithmetic is simplest, so least is left unproven.
_GIVEN_UP_FIRST = ("replicate", "shard", "tensor", "pipeline")


def shrink(plan: Plan, ranks: int) -> tuple[Plan, str | None]:
    """A plan of at most `ranks` ranks, and what it was shrunk to in words; None where it fits as it is."""
    sizes = plan.axes.model_dump()
    while _product(sizes) > ranks:
        axis = _next(sizes)
        sizes[axis] = _smaller(axis, sizes[axis])
    if sizes == plan.axes.model_dump():
        return plan, None
    smaller = _with_axes(plan, Axes(**sizes))
    return smaller, f"{_words(plan)} to {_words(smaller)}: {ranks} ranks are available, the plan has {plan.world_size}"


def _next(sizes: dict[str, int]) -> str:
    """The largest axis that stays an axis; where there is none, the first to be given up."""
    staying = [axis for axis in _GIVEN_UP_FIRST if _smaller(axis, sizes[axis]) > 1]
    if staying:
        return max(staying, key=lambda axis: sizes[axis])
    return next(axis for axis in _GIVEN_UP_FIRST if sizes[axis] > 1)


def _smaller(axis: str, size: int) -> int:
    """Divided by its smallest factor: what an axis of 8 divides, one of 4 does. Data ranks divide anything."""
    factor = next((factor for factor in range(2, size) if size % factor == 0), size)
    return 2 if factor == size > 2 and axis in ("replicate", "shard") else max(1, size // factor)


def _with_axes(plan: Plan, axes: Axes) -> Plan:
    modules = plan.modules
    if axes.replicate == 1:
        splits = {name: split for name, split in modules.splits.items() if split.axis != "replicate"}
        modules = modules.model_copy(update={"splits": splits})
    # What lived on a rank that is gone lives on one that is left.
    branches = {name: place % axes.tensor for name, place in modules.branches.items()} if axes.tensor > 1 else {}
    modules = modules.model_copy(update={"branches": branches})
    changed = plan.model_copy(update={"axes": axes, "modules": modules, "pipeline": _pipeline(plan, axes.pipeline)})
    return Plan.model_validate(changed.model_dump())  # what does not fit together is told here


def _pipeline(plan: Plan, ranks: int) -> Pipeline:
    """Every n-th cut stays, so that a rank keeps its number of stages."""
    if ranks == plan.axes.pipeline:
        return plan.pipeline
    if ranks == 1:
        return Pipeline()
    every = plan.axes.pipeline // ranks
    return plan.pipeline.model_copy(update={"cuts": plan.pipeline.cuts[every - 1 :: every]})


def _words(plan: Plan) -> str:
    return " × ".join(f"{name} {size}" for name, size in plan.axes.model_dump().items() if size > 1) or "one rank"


def _product(sizes: dict[str, int]) -> int:
    product = 1
    for size in sizes.values():
        product *= size
    return product
