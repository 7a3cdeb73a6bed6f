"""Data sets of Hugging Face's `datasets`, with random access and streamed."""

import json
import logging
import random
from pathlib import Path
from typing import Any

import datasets
import pytest

from meshwright.data.loading import LoadingOptions, SampleShare, eval_batches, train_batches
from meshwright.errors import InputError, UserCodeError
from tests.data.sources import as_list, batches, samples_of
from tests.data.test_mapped import assert_same_batches

ROWS: list[dict[str, Any]] = [{"index": index, "text": f"row {index}"} for index in range(13)]


def stream(shards: int = 2) -> Any:
    return datasets.Dataset.from_list(ROWS).to_iterable_dataset(num_shards=shards)


def file_stream(folder: Path, kind: str = "json") -> Any:
    """A stream of two files of this kind."""
    files = [folder / f"{number}.{kind}" for number in range(2)]
    for number, file in enumerate(files):
        rows = ROWS[number * 7 : number * 7 + 7]
        if kind == "parquet":
            datasets.Dataset.from_list(rows).to_parquet(file)
        else:
            file.write_text("".join((json.dumps(row) if kind == "json" else row["text"]) + "\n" for row in rows))
    names, cache = [str(file) for file in files], str(folder / "cache")
    return datasets.load_dataset(kind, data_files=names, streaming=True, split="train", cache_dir=cache)


def numbered() -> Any:
    yield from ROWS


def _doubled(row: dict[str, Any]) -> dict[str, Any]:
    return {"doubled": 2 * row["index"]}


STREAMS = {
    "rows": stream,
    "generator": lambda: datasets.IterableDataset.from_generator(numbered),
    "map": lambda: stream().map(_doubled),
    "batched map": lambda: stream().map(lambda rows: {"more": rows["index"]}, batched=True, batch_size=3),
    "filter": lambda: stream().filter(lambda row: row["index"] % 5 != 1),
    "shuffle": lambda: stream().shuffle(seed=3, buffer_size=5),
    "torch": lambda: stream().with_format("torch"),
    "interleaved": lambda: datasets.interleave_datasets([stream(), stream().map(lambda row: {"index": -row["index"]})]),
}
QUICK = ("shuffle", "batched map")
streams = pytest.mark.parametrize(
    "make",
    [pytest.param(make, id=name, marks=() if name in QUICK else pytest.mark.soak) for name, make in STREAMS.items()],
)


def rows_of(batch: Any) -> list[dict[str, Any]]:
    return [{key: str(value) for key, value in row.items()} for row in samples_of(batch)]


def with_rows(loaded: list[Any]) -> list[Any]:
    return [(batch.epoch, batch.index, batch.last, batch.samples, rows_of(batch)) for batch in loaded]


def resumed(make: Any, after: Any, **options: Any) -> list[Any]:
    """The batches of a new stream, from the batch after this one on."""
    state = None if after.last else after.stream
    start = (after.epoch + 1, 0) if after.last else (after.epoch, after.index + 1)
    return batches(make(), start=start, stream_state=state, **options)


@streams
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_ranks_share_each_batch_of_a_stream(make: Any, ranks: int) -> None:
    whole = batches(make())
    assert sum(batch.samples for batch in whole) == 2 * len(list(make()))
    for of_rank in zip(whole, *(batches(make(), rank, ranks) for rank in range(ranks)), strict=True):
        assert [row for share in of_rank[1:] for row in rows_of(share)] == rows_of(of_rank[0])


@streams
def test_a_resumed_run_continues_with_the_next_batch(make: Any) -> None:
    whole = batches(make(), epochs=2)
    for number, batch in enumerate(whole[:-1]):
        assert with_rows(resumed(make, batch)) == with_rows(whole)[number + 1 :]


def test_a_run_that_was_resumed_can_be_resumed_again() -> None:
    whole = batches(stream(), epochs=1)
    again = resumed(stream, whole[1], epochs=1)
    assert again[0].stream is not None
    assert with_rows(resumed(stream, again[0], epochs=1)) == with_rows(whole)[3:]


def test_samples_before_the_position_are_not_read_again() -> None:
    read: list[int] = []

    def count(row: dict[str, Any]) -> dict[str, Any]:
        read.append(row["index"])
        return row

    whole = batches(stream().map(count), epochs=1)
    read.clear()
    resumed(lambda: stream().map(count), whole[2], epochs=1)
    assert read == list(range(8, 13))  # from the last batch before the checkpoint on


def test_a_shuffled_stream_is_read_from_its_beginning(caplog: pytest.LogCaptureFixture) -> None:
    whole = batches(STREAMS["shuffle"](), epochs=1)
    with caplog.at_level(logging.WARNING, "meshwright.data"):
        resumed(STREAMS["shuffle"], whole[2], epochs=1)
    ours = [record for record in caplog.records if record.name == "meshwright.data"]
    assert [record.getMessage() for record in ours] == [
        "IterableDataset does not continue exactly after load_state_dict: reading and dropping 12 samples to continue"
        " at batch 3 of epoch 0"
    ]


def test_a_stream_that_was_shuffled_without_a_seed_is_named(caplog: pytest.LogCaptureFixture) -> None:
    whole = batches(stream().shuffle(seed=1, buffer_size=20), epochs=1)
    with caplog.at_level(logging.WARNING, "meshwright.data"):
        resumed(lambda: stream().shuffle(seed=2, buffer_size=20), whole[1], epochs=1)
    assert "does not give the samples that it gave before the checkpoint, at batch 1 of epoch 0" in caplog.text


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_workers_change_nothing(tmp_path: Path, workers: int) -> None:
    """`datasets` divides a stream's files among the workers that it sees."""
    files = file_stream(tmp_path).shuffle(seed=0, buffer_size=4)
    whole = batches(files, epochs=1)
    assert_same_batches(whole, [batches(files, rank, 2, workers=workers, epochs=1) for rank in range(2)])
    assert with_rows(batches(files, epochs=2)) == with_rows(batches(files, epochs=2, workers=workers))


@pytest.mark.parametrize("kind", ["parquet", pytest.param("text", marks=pytest.mark.soak)])
def test_a_stream_of_files_continues_in_workers(tmp_path: Path, kind: str) -> None:
    def make() -> Any:
        return file_stream(tmp_path, kind)

    whole = batches(make(), epochs=1)
    assert [row["text"] for batch in whole for row in rows_of(batch)] == [row["text"] for row in ROWS]
    assert with_rows(resumed(make, whole[1], workers=2, epochs=1)) == with_rows(whole)[2:]


def test_files_are_shuffled_anew_in_every_epoch(tmp_path: Path) -> None:
    shuffled = file_stream(tmp_path).shuffle(seed=0, buffer_size=20)
    first, second = ([row for batch in batches(shuffled) if batch.epoch == e for row in rows_of(batch)] for e in (0, 1))
    assert first != second
    assert sorted(row["index"] for row in first) == sorted(row["index"] for row in second)


def test_evaluation_sees_every_row_once(tmp_path: Path) -> None:
    loading = LoadingOptions(collate=as_list)
    shares = [SampleShare(rank, 3) for rank in range(3)]
    found = [list(eval_batches(file_stream(tmp_path), batch=2, share=share, loading=loading)) for share in shares]
    indices = [row["index"] for of_rank in found for microbatch in of_rank for row in microbatch.data]
    assert sorted(indices) == list(range(13))


def test_rows_with_random_access_become_tensors() -> None:
    rows = datasets.Dataset.from_dict({"x": [[float(i), 1.0] for i in range(5)], "label": list(range(5))})
    loaded = train_batches(
        rows.with_format("torch"), seed=0, global_batch=3, share=SampleShare(), loading=LoadingOptions(), epochs=1
    )
    data = [batch.microbatches[0].data for batch in loaded]
    assert [tuple(batch["x"].shape) for batch in data] == [(3, 2), (2, 2)]
    assert sorted(label for batch in data for label in batch["label"].tolist()) == list(range(5))


def _noisy(rows: dict[str, Any]) -> dict[str, Any]:
    return {"index": rows["index"], "noise": [random.random() for _ in rows["index"]]}


def test_random_transforms_do_not_depend_on_the_number_of_ranks() -> None:
    rows = datasets.Dataset.from_list(ROWS).with_transform(_noisy)
    whole = batches(rows)
    assert_same_batches(whole, [batches(rows, rank, 3) for rank in range(3)])
    drawn = [row["noise"] for batch in whole for row in samples_of(batch)]
    assert len(set(drawn)) == len(drawn)


def collated(rows: Any) -> Any:
    loading = LoadingOptions()
    return list(train_batches(rows, seed=0, global_batch=3, share=SampleShare(), loading=loading, epochs=1))


@pytest.mark.parametrize("form", [None, "torch"])
@pytest.mark.parametrize("streamed", [False, True])
def test_lists_of_different_lengths_are_named(form: str | None, streamed: bool) -> None:
    rows = datasets.Dataset.from_dict({"label": [0, 1, 0], "input_ids": [[1, 2], [3, 4], [5, 6, 7]]}).with_format(form)
    with pytest.raises(UserCodeError) as caught:
        collated(rows.to_iterable_dataset() if streamed else rows)
    message = str(caught.value)
    assert "'input_ids' has the shapes (" in message
    assert message.endswith("pad the samples to one length, or give a collate function that does")


@pytest.mark.parametrize("streamed", [False, True])
def test_lists_that_would_not_become_tensors_are_refused(streamed: bool) -> None:
    rows = datasets.Dataset.from_dict({"label": [0, 1], "input_ids": [[1, 2], [3, 4]]})
    with pytest.raises(InputError, match=r"'input_ids' is a list in the rows .*: call with_format\(\"torch\"\) of"):
        collated(rows.to_iterable_dataset() if streamed else rows)


def test_missing_values_are_named() -> None:
    with pytest.raises(UserCodeError, match=r"'b' is None in some samples: fill it in or leave it out"):
        collated(datasets.Dataset.from_dict({"a": [1, 2], "b": [3, None]}))


def test_several_splits_are_refused() -> None:
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS)})
    with pytest.raises(InputError, match=r"is a DatasetDict with the keys 'train', 'test', not a data set: choose one"):
        batches(splits)


def test_a_stream_that_is_divided_already_is_refused() -> None:
    from datasets.distributed import split_dataset_by_node

    with pytest.raises(InputError, match=r"leave split_dataset_by_node out"):
        batches(split_dataset_by_node(stream(), rank=0, world_size=2))
