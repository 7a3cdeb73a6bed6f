"""Batches are divided in the proportions that the table has for their number, also in workers that were started
before a change."""

from typing import Any

import pytest

from meshwright.data.batch import LoadingOptions, SampleShare
from meshwright.data.loading import train_batches
from meshwright.data.share_table import ShareTable
from tests.data.sources import Augmented, Stream, as_list, batches, samples_of


def test_a_change_begins_with_its_first_batch() -> None:
    table = ShareTable((1, 1))
    for first in range(10, 210, 2):  # more than the table keeps
        table.add(first, (first, 1))
    assert [table.at(batch) for batch in (208, 209, 207, 500)] == [(208, 1), (208, 1), (206, 1), (208, 1)]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dataset", [Augmented(24), Stream(24)], ids=["samples", "stream"])
def test_a_change_reaches_loaders_that_have_begun(dataset: Any, workers: int) -> None:
    table = ShareTable((1, 1))
    prefetched = {"prefetch_factor": 1} if workers else {}
    loading = LoadingOptions(workers=workers, collate=as_list, loader_options=prefetched)
    shares = [SampleShare(rank, 2, changes=table, first=100) for rank in range(2)]
    loaders = [
        train_batches(dataset, seed=7, global_batch=6, share=share, loading=loading, epochs=2) for share in shares
    ]
    of_ranks = []
    for number in range(8):
        of_ranks.append([samples_of(next(loader)) for loader in loaders])
        if number == 0:
            table.add(104, (5, 1))  # the fifth batch, which is the first one of the second epoch
    for loader in loaders:
        loader.close()  # type: ignore[attr-defined]
    assert [[len(samples) for samples in batch] for batch in of_ranks] == [[3, 3]] * 4 + [[5, 1]] * 4
    whole = [samples_of(batch) for batch in batches(dataset, global_batch=6)]
    assert [first + second for first, second in of_ranks] == whole
