"""The batch sizes of a DeepSpeed configuration, and the rule that joins them:

train_batch_size = train_micro_batch_size_per_gpu × gradient_accumulation_steps × data-parallel ranks
"""

from dataclasses import dataclass

from meshwright.errors import InputError


@dataclass(frozen=True)
class BatchSizes:
    """The three sizes as a configuration gives them; None for one that it leaves out."""

    train: int | None
    micro: int | None
    accumulation: int | None

    @property
    def data_ranks(self) -> int | None:
        """The number of data-parallel ranks that the three sizes determine; None if one is missing, or if they
        determine none."""
        if self.train is None or self.micro is None or self.accumulation is None:
            return None
        ranks, rest = divmod(self.train, self.micro * self.accumulation)
        return None if rest else ranks


@dataclass(frozen=True)
class CompleteSizes:
    """Three sizes that obey the rule for `data_ranks` ranks."""

    train: int
    micro: int
    accumulation: int
    data_ranks: int


def complete(sizes: BatchSizes, data_ranks: int, source: str) -> CompleteSizes:
    """Returns the sizes with the missing ones filled in as DeepSpeed does. Raises an `InputError` that has all numbers
    if they contradict each other."""
    train, micro, accumulation = sizes.train, sizes.micro, sizes.accumulation
    if train is None and micro is None:
        raise InputError(
            f"{source}: neither train_batch_size nor train_micro_batch_size_per_gpu is there: give one of them"
        )
    if train is None:
        assert micro is not None
        accumulation = accumulation or 1
        train = micro * accumulation * data_ranks
    elif micro is None:
        accumulation = accumulation or 1
        micro = train // (data_ranks * accumulation)
    elif accumulation is None:
        accumulation = train // (micro * data_ranks)
    assert micro is not None
    assert accumulation is not None
    if train != micro * accumulation * data_ranks or 0 in (train, micro, accumulation):
        raise InputError(f"{source}: {_contradiction(sizes, data_ranks)}")
    return CompleteSizes(train, micro, accumulation, data_ranks)


def _contradiction(sizes: BatchSizes, data_ranks: int) -> str:
    """Says which sizes do not obey the rule, and the nearest numbers that do."""
    train, micro, accumulation = sizes.train, sizes.micro, sizes.accumulation
    assert train is not None
    rule = "train_batch_size = train_micro_batch_size_per_gpu × gradient_accumulation_steps × data-parallel ranks"
    product = f"{_known(micro)} × {_known(accumulation)} × {data_ranks}"
    share = (micro or 1) * (accumulation or 1) * data_ranks
    nearest = max(1, round(train / share)) * share if micro is None or accumulation is None else share
    wrong = "cannot be" if micro is None or accumulation is None else "is not"
    return (
        f"{rule}, but {train} {wrong} {product}: write train_batch_size: {nearest}, change another of these numbers, or"
        " leave out one of them, which is then computed"
    )


def _known(size: int | None) -> str:
    return "a whole number" if size is None else str(size)
