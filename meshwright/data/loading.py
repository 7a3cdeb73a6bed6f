"""The batches that a rank trains and evaluates on.

Global batch k of epoch e is a function of (seed, e, k), the data and the batch size alone: the number of ranks,
accumulation, workers and restarts do not change it. `mapped` implements this for data sets with random access, and
`streams` for iterable ones.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch.utils.data import IterableDataset

from meshwright.data.batch import Batch, LoadingOptions, Microbatch, SampleShare, StreamState
from meshwright.data.mapped import eval_mapped, train_mapped
from meshwright.data.streams import eval_stream, train_stream
from meshwright.numbers.limits import check_count

__all__ = [
    "Batch",
    "LoadingOptions",
    "Microbatch",
    "SampleShare",
    "StreamState",
    "eval_batches",
    "is_stream",
    "train_batches",
]


def train_batches(
    dataset: Any,
    *,
    seed: int,
    global_batch: int,
    share: SampleShare,
    loading: LoadingOptions,
    accumulation: int = 1,
    start: tuple[int, int] = (0, 0),
    epochs: int | None = None,
    drop_last: bool = False,
    stream_state: StreamState | None = None,
) -> Iterator[Batch]:
    """Yields this rank's part of every global batch. Batches go from `start` = (epoch, index of the batch) to the end
    of epoch `epochs` - 1; they never end if `epochs` is None. `stream_state` is that of the batch before `start`, if a
    checkpoint has it: a stream that can continue there does not read what comes before. Close the iterator to end its
    worker processes at once."""
    if epochs is not None:
        check_count("epochs", epochs, least=0)
    train = partial(train_stream, state=stream_state) if is_stream(dataset) else train_mapped
    return train(
        dataset,
        seed=seed,
        global_batch=global_batch,
        share=share,
        loading=loading,
        accumulation=accumulation,
        start=start,
        epochs=epochs,
        drop_last=drop_last,
    )


def eval_batches(
    dataset: Any, *, batch: int, share: SampleShare, loading: LoadingOptions, seed: int = 0
) -> Iterator[Microbatch]:
    """Yields this rank's part of a data set, `batch` samples at a time. All ranks together get every sample exactly
    once. Nothing is padded or borrowed, so a rank may get one batch fewer than another rank, or none."""
    evaluate = eval_stream if is_stream(dataset) else eval_mapped
    return evaluate(dataset, batch=batch, share=share, loading=loading, seed=seed)


def is_stream(dataset: Any) -> bool:
    """Whether a data set can only be iterated over, and has no random access to samples."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
