"""The batches a rank trains and evaluates on.

Global batch k of epoch e is a function of (seed, e, k), the data and the batch size alone: ranks,
accumulation, workers and restarts do not change it. `mapped` and `streams` keep that for the
two kinds of data set.
"""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from meshwright.data.batch import Batch, Loading, Microbatch, Share
from meshwright.data.mapped import eval_mapped, train_mapped
from meshwright.data.streams import eval_stream, train_stream

__all__ = ["Batch", "Loading", "Microbatch", "Share", "eval_batches", "train_batches"]


def train_batches(
    dataset: Any,
    *,
    seed: int,
    global_batch: int,
    share: Share,
    loading: Loading,
    accumulation: int = 1,
    start: tuple[int, int] = (0, 0),
    epochs: int | None = None,
    drop_last: bool = False,
) -> Iterator[Batch]:
    """This rank's part of every batch from `start` = (epoch, index) up to the end of epoch `epochs` - 1, or
    without end. Close the iterator to end its workers at once."""
    train = train_stream if _is_stream(dataset) else train_mapped
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


def eval_batches(dataset: Any, *, batch: int, share: Share, loading: Loading, seed: int = 0) -> Iterator[Microbatch]:
    """Every sample exactly once over all ranks, `batch` at a time on each: nothing is padded or borrowed, so
    a rank may get one batch fewer than another, or none."""
    evaluate = eval_stream if _is_stream(dataset) else eval_mapped
    return evaluate(dataset, batch=batch, share=share, loading=loading, seed=seed)


def _is_stream(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
