"""Checks, before anything is loaded, that every rank gets samples of a full global batch, and that the optimizer can
update shards in proportion to memory."""

from torch.optim import Optimizer

from meshwright.errors import InputError
from meshwright.numbers.limits import check_count
from meshwright.plan import Plan
from meshwright.plan_fields.shares import describe_shares, fewest_parts, share_sizes
from meshwright.plan_rules.table import check_rules
from meshwright.profile.optimizer import is_elementwise


def check_global_batch(plan: Plan, global_batch: int, partition: str = "batch", parts: int | None = None) -> None:
    """Raises an `InputError` if a global batch has too few samples for all ranks and microbatches of the plan, or if
    the plan's shares do not go with `data.partition`. `parts` is the number of parts of the data set, if it is
    given."""
    check_count("global_batch", global_batch)
    if global_batch < plan.batch_parts:
        raise InputError(
            f"train.global_batch is {global_batch}, smaller than {plan.data_ranks} data-parallel ranks ×"
            f" {plan.microbatches} microbatches = {plan.batch_parts}: raise it, or reduce axes.replicate, axes.shard,"
            " memory.accumulation or pipeline.microbatches"
        )
    sizes = plan.share_sizes(global_batch)
    if min(sizes) < plan.microbatches:
        rank = sizes.index(min(sizes))
        needed = "none" if not sizes[rank] else f"{sizes[rank]}, fewer than its {plan.microbatches} microbatches"
        raise InputError(
            f"of a train.global_batch of {global_batch}, plan.shares.samples [{describe_shares(plan.shares.samples)}]"
            f" gives data rank {rank} {needed}: raise the global batch, give that rank a larger share, or reduce"
            " memory.accumulation or pipeline.microbatches"
        )
    check_rules(plan, partition=partition)
    if partition == "sample":
        _check_parts(plan, parts)


def check_optimizer(plan: Plan, optimizer: Optimizer) -> None:
    """Raises an `InputError` if the plan divides weights in proportion to memory, and the optimizer may look at more
    than one row at a time: torch would gather or average its tensors as if they were divided evenly."""
    if plan.shares.uneven_shards and not is_elementwise(optimizer):
        raise InputError(
            f"plan.shares.shards is [{describe_shares(plan.shares.shards)}], with which each element of a weight must"
            f" be updated by itself, but {type(optimizer).__name__} is not known to do that: use an optimizer of"
            " torch.optim such as AdamW or SGD, or leave shares.shards out"
        )


def _check_parts(plan: Plan, parts: int | None) -> None:
    """Raises an `InputError` if fixed parts of a data set cannot be given to ranks in the plan's shares."""
    samples = plan.shares.samples
    if samples and parts is not None and 0 in share_sizes(parts, samples):
        raise InputError(
            f"data.parts is {parts}, too few for plan.shares.samples [{describe_shares(samples)}], by which some rank"
            f" gets none of them: {fewest_parts(samples)} parts divide exactly so"
        )


def default_parts(plan: Plan) -> int:
    """The number of fixed parts of a data set if none is given: one per rank, or as many as exact shares need."""
    return fewest_parts(plan.shares.samples) if plan.shares.samples else plan.data_ranks
