import logging
from collections.abc import Iterator
from dataclasses import replace
from threading import Lock
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.loading import LoadingOptions, SampleShare, eval_batches, train_batches
from meshwright.errors import InputError
from tests.data.sources import SeekingStream, Stream, as_list, batches, draw, samples_of
from tests.data.test_mapped import assert_same_batches

kinds = pytest.mark.parametrize("kind", [Stream, SeekingStream])


@kinds
@settings(max_examples=40)
@given(
    size=st.integers(1, 23),
    batch=st.integers(1, 9),
    ranks=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    drop_last=st.booleans(),
)
def test_ranks_together_see_the_one_rank_batches(
    kind: Any, size: int, batch: int, ranks: int, accumulation: int, drop_last: bool
) -> None:
    if drop_last and size < batch:
        batch = size
    options: dict[str, Any] = {"global_batch": batch, "drop_last": drop_last}
    whole = batches(kind(size), **options)
    of_ranks = [batches(kind(size), rank, ranks, accumulation=accumulation, **options) for rank in range(ranks)]
    assert_same_batches(whole, of_ranks)


@kinds
@pytest.mark.parametrize("size", [8, 9])
def test_batches_are_consecutive_positions(kind: Any, size: int) -> None:
    loaded = batches(kind(size))
    seen = [[sample[:2] for sample in samples_of(batch)] for batch in loaded if batch.epoch == 1]
    assert seen == [[(1, p) for p in range(size)[begin : begin + 4]] for begin in range(0, size, 4)]
    assert [batch.last for batch in loaded] == [*[False] * (len(seen) - 1), True] * 2


def test_the_last_whole_batch_is_the_last_where_the_rest_is_dropped() -> None:
    loaded = batches(Stream(10), drop_last=True, epochs=1)
    assert [(batch.samples, batch.last) for batch in loaded] == [(4, False), (4, True)]


@kinds
@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (2, 2), (3, 1)])
def test_workers_change_nothing(kind: Any, ranks: int, workers: int) -> None:
    """This stream would split itself if it saw that it runs in a worker."""
    of_ranks = [batches(kind(13), rank, ranks, workers=workers, epochs=1) for rank in range(ranks)]
    assert_same_batches(batches(kind(13), epochs=1), of_ranks)


@kinds
@settings(max_examples=30)
@given(size=st.integers(1, 20), batch=st.integers(1, 7), data=st.data())
def test_a_resumed_run_continues_with_the_next_batch(kind: Any, size: int, batch: int, data: st.DataObject) -> None:
    whole = batches(kind(size), global_batch=batch, epochs=3)
    resumed_at = data.draw(st.integers(0, len(whole) - 1))
    start = (whole[resumed_at].epoch, whole[resumed_at].index)
    assert batches(kind(size), global_batch=batch, epochs=3, start=start) == whole[resumed_at:]


@kinds
def test_a_resumed_run_may_use_workers(kind: Any) -> None:
    assert batches(kind(10), start=(0, 1), workers=2) == batches(kind(10))[1:]


@kinds
def test_the_end_of_an_epoch_is_the_start_of_the_next(kind: Any) -> None:
    assert batches(kind(8), start=(0, 2)) == batches(kind(8), start=(1, 0))


def test_a_stream_that_can_seek_is_not_read_from_the_beginning() -> None:
    stream = SeekingStream(10)
    batches(stream, start=(0, 2))
    assert stream.sought == [8, 0]


def test_one_rank_warns_that_samples_are_read_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "meshwright.data"):
        for rank in range(2):
            batches(Stream(10), rank, 2, start=(0, 2))
        batches(SeekingStream(10), start=(0, 2))
    assert [record.getMessage() for record in caplog.records] == [
        "Stream has no seek(position): reading and dropping 8 samples to continue at batch 2 of epoch 0"
    ]


def drawing(samples: list[Any]) -> tuple[float, float, float]:
    return draw()


@pytest.mark.parametrize("workers", [0, 1])
def test_collate_functions_draw_different_numbers_on_every_rank(workers: int) -> None:
    loading = LoadingOptions(workers=workers, collate=drawing)
    drawn = []
    for rank in range(2):
        loaded = train_batches(
            Stream(8), seed=0, global_batch=4, share=SampleShare(rank, 2), loading=loading, accumulation=2, epochs=1
        )
        drawn += [microbatch.data for batch in loaded for microbatch in batch.microbatches]
    assert len(set(drawn)) == len(drawn) == 8
    again = train_batches(
        Stream(8), seed=0, global_batch=4, share=SampleShare(), loading=LoadingOptions(collate=drawing)
    )
    assert next(iter(again)).microbatches[0].data == drawn[0]


def test_a_rank_without_a_share_borrows_a_sample() -> None:
    last = [batches(Stream(5), rank, 2, epochs=1)[-1] for rank in range(2)]
    assert [share.microbatches[0].samples for share in last] == [1, 0]
    assert last[0].microbatches[0].data == last[1].microbatches[0].data


@kinds
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [1, 12, 13])
def test_evaluation_sees_every_sample_once(kind: Any, workers: int, size: int) -> None:
    loading = LoadingOptions(workers=workers, collate=as_list)
    stream = kind(size)
    of_ranks = [list(eval_batches(stream, batch=3, share=SampleShare(r, 2), loading=loading)) for r in range(2)]
    microbatches = [microbatch for of_rank in of_ranks for microbatch in of_rank]
    assert sorted(sample[1] for microbatch in microbatches for sample in microbatch.data) == list(range(size))
    assert all(0 < microbatch.samples == len(microbatch.data) <= 3 for microbatch in microbatches)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_empty_stream_is_refused(workers: int) -> None:
    with pytest.raises(InputError, match=r"Stream ended before its first batch in epoch 0"):
        batches(Stream(0), workers=workers)
    with pytest.raises(InputError, match=r"at least 4 samples \(drop_last is set\)"):
        batches(Stream(3), workers=workers, drop_last=True)
    with pytest.raises(InputError, match=r"Stream is empty"):
        list(eval_batches(Stream(0), batch=2, share=SampleShare(), loading=LoadingOptions(workers=workers)))


def test_an_iterator_that_cannot_start_again_is_refused() -> None:
    with pytest.raises(InputError, match=r"generator ended before its first batch in epoch 1"):
        batches(number for number in range(5))


class StatefulStream(Stream):
    """A stream that says where it is, and continues there."""

    def __init__(self, size: int, holds: Any = None) -> None:
        super().__init__(size)
        self.holds = holds
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def __iter__(self) -> Iterator[Any]:
        begin, self.position = self.position, 0
        for position in range(begin, self.size):
            self.position = position + 1
            yield self.epoch, position, draw()
        self.position = 0


def test_a_stream_with_a_state_continues_there(caplog: pytest.LogCaptureFixture) -> None:
    whole = batches(StatefulStream(13), epochs=2)
    for number, batch in enumerate(whole[1:-1], 1):
        start = (batch.epoch + 1, 0) if batch.last else (batch.epoch, batch.index + 1)
        state = None if batch.last else batch.stream
        for workers in (0, 2) if number == 2 else (0,):
            resumed = batches(StatefulStream(13), start=start, stream_state=state, epochs=2, workers=workers)
            assert [samples_of(share) for share in resumed] == [samples_of(share) for share in whole[number + 1 :]]
    assert [record.args[2] for record in caplog.records if isinstance(record.args, tuple)] == [
        4
    ]  # after batch 0 of epoch 1


@pytest.mark.parametrize("holds", ["a lock", "another state"])
def test_a_stream_that_cannot_continue_is_read_from_its_beginning(holds: str, caplog: pytest.LogCaptureFixture) -> None:
    whole = batches(StatefulStream(13), epochs=1)
    state = whole[1].stream
    assert state is not None
    if holds == "another state":
        state = replace(state, before={"of": "other code"})
    stream = StatefulStream(13, Lock() if holds == "a lock" else None)
    resumed = batches(stream, start=(0, 2), stream_state=state, epochs=1)
    assert [samples_of(share) for share in resumed] == [samples_of(share) for share in whole[2:]]
    assert "reading and dropping 8 samples to continue at batch 2 of epoch 0" in caplog.text
