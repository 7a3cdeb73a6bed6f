import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset

from meshwright.data.loading import Batch, LoadingOptions, SampleShare, eval_batches, train_batches
from meshwright.data.order import permutation
from meshwright.errors import InputError
from tests.data.sources import Augmented, as_list, batches, draw, samples_of


def assert_same_batches(whole: list[Batch], of_ranks: list[list[Batch]]) -> None:
    """The shares of all ranks, concatenated in order, equal the batches of a single rank, including augmentation."""
    for k, batch in enumerate(whole):
        shares = [of_rank[k] for of_rank in of_ranks]
        assert [sample for share in shares for sample in samples_of(share)] == samples_of(batch)
        for share in shares:
            assert (share.samples, share.epoch, share.index, share.last) == (
                batch.samples,
                batch.epoch,
                batch.index,
                batch.last,
            )
        assert len({len(share.microbatches) for share in shares}) == 1
    assert all(len(of_rank) == len(whole) for of_rank in of_ranks)


@settings(max_examples=60)
@given(
    size=st.integers(1, 23),
    batch=st.integers(1, 9),
    ranks=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    drop_last=st.booleans(),
)
def test_ranks_together_see_the_one_rank_batches(
    size: int, batch: int, ranks: int, accumulation: int, drop_last: bool
) -> None:
    if drop_last and size < batch:
        batch = size
    options: dict[str, Any] = {"global_batch": batch, "drop_last": drop_last}
    whole = batches(Augmented(size), **options)
    of_ranks = [batches(Augmented(size), rank, ranks, accumulation=accumulation, **options) for rank in range(ranks)]
    assert_same_batches(whole, of_ranks)


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (2, 2), (3, 1)])
def test_workers_change_nothing(ranks: int, accumulation: int) -> None:
    whole = batches(Augmented(10))
    of_ranks = [batches(Augmented(10), rank, ranks, workers=2, accumulation=accumulation) for rank in range(ranks)]
    assert_same_batches(whole, of_ranks)


@settings(max_examples=40)
@given(size=st.integers(1, 20), batch=st.integers(1, 7), data=st.data())
def test_a_resumed_run_continues_with_the_next_batch(size: int, batch: int, data: st.DataObject) -> None:
    whole = batches(Augmented(size), global_batch=batch, epochs=3)
    resumed_at = data.draw(st.integers(0, len(whole) - 1))
    start = (whole[resumed_at].epoch, whole[resumed_at].index)
    assert batches(Augmented(size), global_batch=batch, epochs=3, start=start) == whole[resumed_at:]


def test_a_resumed_run_may_use_workers() -> None:
    whole = batches(Augmented(10), epochs=3)
    assert batches(Augmented(10), epochs=3, start=(1, 1), workers=2) == whole[4:]


def test_the_end_of_an_epoch_is_the_start_of_the_next() -> None:
    assert batches(Augmented(10), start=(0, 3)) == batches(Augmented(10), start=(1, 0))


def test_the_order_is_the_epochs_permutation() -> None:
    for epoch in range(2):
        seen = [sample[0] for batch in batches(Augmented(10)) if batch.epoch == epoch for sample in samples_of(batch)]
        assert seen == permutation(7, epoch, 10).tolist()


def test_without_a_number_of_epochs_batches_never_end() -> None:
    endless = train_batches(
        Augmented(3), seed=0, global_batch=2, share=SampleShare(), loading=LoadingOptions(), epochs=None
    )
    seen = [(batch.epoch, batch.index, batch.last) for batch, _ in zip(endless, range(7), strict=False)]
    assert seen[-3:] == [(2, 0, False), (2, 1, True), (3, 0, False)]


def test_augmentation_changes_with_epoch_sample_and_seed() -> None:
    of_seeds = [batches(Augmented(6), seed=seed) for seed in (1, 2)]
    drawn = {sample[1] for whole in of_seeds for batch in whole for sample in samples_of(batch)}
    assert len(drawn) == 2 * 2 * 6


def test_a_rank_without_a_share_borrows_a_sample() -> None:
    last = [batches(Augmented(5), rank, 3, epochs=1)[-1] for rank in range(3)]
    assert [share.microbatches[0].samples for share in last] == [1, 0, 0]
    assert last[1].microbatches[0].data == last[2].microbatches[0].data == last[0].microbatches[0].data
    assert [share.samples for share in last] == [1, 1, 1]


def test_ranks_with_a_smaller_share_get_the_same_number_of_microbatches() -> None:
    of_ranks = [batches(Augmented(3), rank, 2, global_batch=3, accumulation=2)[0].microbatches for rank in range(2)]
    assert [[microbatch.samples for microbatch in of_rank] for of_rank in of_ranks] == [[1, 1], [1, 0]]


@pytest.mark.parametrize("kind", [Augmented, lambda size: Subset(Augmented(size + 3), range(size))])
def test_loading_leaves_the_random_generators_of_a_rank_alone(kind: Any) -> None:
    """Dropout draws from these generators. Starting a loader may not draw from them either."""

    def states() -> tuple[Any, str, list[int]]:
        return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()

    np.random.randn()  # numpy draws two of these and stores the second: that must be preserved as well
    before = states()
    for workers in (0, 1):
        batches(kind(6), workers=workers)
    assert states() == before


def test_a_subset_is_seeded_sample_by_sample() -> None:
    """A Subset has __getitems__, like data sets that are called with whole lists."""
    subset = Subset(Augmented(12), range(1, 12))
    assert_same_batches(batches(subset), [batches(subset, rank, 2) for rank in range(2)])


class InLists(Dataset[Any]):
    """Reads whole lists of samples and no single one."""

    def __len__(self) -> int:
        return 10

    def __getitems__(self, indices: list[int]) -> list[tuple[int, int]]:
        return [(index, len(indices)) for index in indices]


def test_a_data_set_with_getitems_is_called_once_per_microbatch() -> None:
    assert {sample[1] for batch in batches(InLists()) for sample in samples_of(batch)} == {4, 2}


class Named(Dataset[Any]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": torch.full((2, 2), float(index)), "label": index, "name": str(index)}


def test_dicts_are_collated() -> None:
    loaded = train_batches(Named(), seed=0, global_batch=3, share=SampleShare(), loading=LoadingOptions(), epochs=1)
    first = next(iter(loaded)).microbatches[0].data
    assert first["image"].shape == (3, 2, 2)
    assert first["label"].tolist() == [int(name) for name in first["name"]]


class Words(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(index + 1)


def masked(samples: list[torch.Tensor]) -> tuple[torch.Tensor, tuple[float, float, float]]:
    """Pads, and draws random numbers, as collate functions for masked language models do."""
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1), draw()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_custom_collate_function_is_seeded_and_may_pad(workers: int) -> None:
    loading = LoadingOptions(workers=workers, collate=masked)
    loaded = list(train_batches(Words(), seed=0, global_batch=4, share=SampleShare(), loading=loading, epochs=1))
    padded, drawn = loaded[0].microbatches[0].data
    assert padded.shape[0] == 4
    reference = train_batches(
        Words(), seed=0, global_batch=4, share=SampleShare(), loading=LoadingOptions(collate=masked), epochs=1
    )
    assert drawn == next(iter(reference)).microbatches[0].data[1]


@settings(max_examples=60)
@given(size=st.integers(1, 40), batch=st.integers(1, 6), ranks=st.integers(1, 4))
def test_evaluation_sees_every_sample_once(size: int, batch: int, ranks: int) -> None:
    seen = []
    for rank in range(ranks):
        for part in eval_batches(
            Augmented(size), batch=batch, share=SampleShare(rank, ranks), loading=LoadingOptions(collate=as_list)
        ):
            assert 0 < part.samples == len(part.data) <= batch
            seen += part.data
    whole = [
        sample
        for part in eval_batches(
            Augmented(size), batch=size, share=SampleShare(), loading=LoadingOptions(collate=as_list)
        )
        for sample in part.data
    ]
    assert sorted(seen) == whole
    assert [sample[0] for sample in whole] == list(range(size))


def test_evaluation_with_workers() -> None:
    def seen(workers: int) -> list[Any]:
        loading = LoadingOptions(workers=workers, collate=as_list)
        return list(eval_batches(Augmented(11), batch=2, share=SampleShare(1, 2), loading=loading))

    assert seen(2) == seen(0)


def test_errors_say_that_there_is_nothing_to_load() -> None:
    with pytest.raises(InputError, match="Augmented is empty"):
        batches(Augmented(0))
    with pytest.raises(InputError, match="Augmented is empty"):
        list(eval_batches(Augmented(0), batch=2, share=SampleShare(), loading=LoadingOptions()))
    with pytest.raises(InputError, match=r"3 samples, fewer than the global batch of 4.*drop_last"):
        batches(Augmented(3), drop_last=True)
    with pytest.raises(InputError, match=r"batch 9 of epoch 0.*an epoch has 3"):
        batches(Augmented(10), start=(0, 9))


class Endless(Dataset[Any]):
    def __getitem__(self, index: int) -> int:
        return index


def test_a_data_set_without_length_is_refused() -> None:
    with pytest.raises(InputError, match=r"Endless has no length.*IterableDataset"):
        batches(Endless())


class Broken(Augmented):
    def __getitem__(self, index: int) -> Any:
        raise InputError(f"picture {index}: cannot be read")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_data_set_is_raised_as_one_line(workers: int) -> None:
    with pytest.raises(InputError, match=r"^picture \d: cannot be read$"):
        batches(Broken(4), workers=workers)
