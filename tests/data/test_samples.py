"""Whatever a data set or a collate function raises is an error that names the sample, the file and the line, and never
the end of the data."""

import multiprocessing
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from meshwright.data.loading import LoadingOptions, SampleShare, eval_batches, train_batches
from meshwright.data.samples import dataset_size
from meshwright.errors import InputError, UserCodeError
from tests.data.sources import as_list

SIZE = 12
BROKEN = 7  # the sample that cannot be read

RAISED: dict[str, type[BaseException]] = {
    kind.__name__: kind
    for kind in (StopIteration, GeneratorExit, SystemExit, KeyboardInterrupt, ValueError, EOFError, ConnectionError)
}
# A KeyboardInterrupt may be a Ctrl-C wherever SIGINT has Python's handler, which ranks and workers do not have.
IN_THIS_PROCESS = [name for name in RAISED if name != "KeyboardInterrupt"]
FILE_AND_LINE = r"\(.*test_samples\.py, line \d+\)$"


class Broken(Dataset[Any]):
    """Reading one of its samples fails."""

    def __init__(self, raised: str) -> None:
        self.raised = raised

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == BROKEN:
            raise RAISED[self.raised]
        return torch.tensor(index)


class BrokenLists(Broken):
    """Reads lists of samples."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class BrokenBatches(Broken):
    """Reads collated batches."""

    def batch_of(self, indices: Any) -> torch.Tensor:
        return torch.stack([self[int(index)] for index in indices])


class BrokenStream(IterableDataset[Any]):
    """Its iterator fails at one sample."""

    def __init__(self, raised: str) -> None:
        self.raised = raised

    def __iter__(self) -> Iterator[torch.Tensor]:
        dataset = Broken(self.raised)
        for index in range(SIZE):
            yield dataset[index]


class Numbers(Dataset[Any]):
    """Its samples, and its length, are those that it is given."""

    def __init__(self, samples: list[Any] | None = None, length: Any = SIZE) -> None:
        self.samples = samples
        self.length = length

    def __len__(self) -> int:
        if isinstance(self.length, type):
            raise self.length("no length today")
        length: int = self.length
        return length

    def __getitem__(self, index: int) -> Any:
        return self.samples[index] if self.samples else torch.tensor(index)


def read_training(dataset: Any, **loading: Any) -> list[Any]:
    options = LoadingOptions(**loading)
    return list(train_batches(dataset, seed=0, global_batch=4, share=SampleShare(), loading=options, epochs=1))


def read_evaluation(dataset: Any, **loading: Any) -> list[Any]:
    return list(eval_batches(dataset, batch=4, share=SampleShare(), loading=LoadingOptions(**loading)))


@pytest.mark.parametrize("raised", IN_THIS_PROCESS)
@pytest.mark.parametrize("read", [read_training, read_evaluation])
@pytest.mark.parametrize("kind", [Broken, BrokenLists, BrokenBatches])
def test_a_sample_that_cannot_be_read_is_named(kind: Any, read: Any, raised: str) -> None:
    words = rf"^samples? (\d+, )*{BROKEN}[^:]* of {kind.__name__}: {raised}.*{FILE_AND_LINE}"
    with pytest.raises(UserCodeError, match=words):
        read(kind(raised))


@pytest.mark.parametrize("raised", RAISED)
def test_a_sample_that_a_worker_cannot_read_is_named(raised: str) -> None:
    for read in (read_training, read_evaluation):
        with pytest.raises(UserCodeError, match=rf"^sample {BROKEN} of Broken: {raised}.*{FILE_AND_LINE}"):
            read(Broken(raised), workers=1)


@pytest.mark.parametrize("raised", IN_THIS_PROCESS)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_fails_is_not_at_its_end(raised: str, workers: int) -> None:
    words = rf"^sample {BROKEN} of the stream BrokenStream: .*{FILE_AND_LINE}"
    with pytest.raises(UserCodeError, match=words):
        read_training(BrokenStream(raised), workers=workers)
    with pytest.raises(UserCodeError, match=words):
        read_evaluation(BrokenStream(raised), workers=workers)


class EndingIterator:
    """An iterator that ends by raising StopIteration, as iterators do."""

    def __init__(self) -> None:
        self.next_sample = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        self.next_sample += 1
        if self.next_sample > SIZE:
            raise StopIteration
        return torch.tensor(self.next_sample)


class EndingStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return EndingIterator()


def test_the_end_of_an_iterator_is_the_end_of_the_data() -> None:
    assert len(read_training(EndingStream())) == 3
    assert len(read_evaluation(EndingStream())) == 3


class StreamWithMethods(EndingStream):
    """One of its methods fails."""

    def __init__(self, failing: str) -> None:
        self.failing = failing

    def set_epoch(self, epoch: int) -> None:
        if self.failing == "set_epoch":
            raise StopIteration

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.failing == "iter":
            raise StopIteration
        return super().__iter__()


@pytest.mark.parametrize(
    ("failing", "words"),
    [("set_epoch", "starting epoch 0 of the stream StreamWithMethods"), ("iter", "iter() of the stream")],
)
def test_the_methods_of_a_stream_may_fail_too(failing: str, words: str) -> None:
    with pytest.raises(UserCodeError, match=rf"^{re.escape(words)}.*: StopIteration {FILE_AND_LINE}"):
        read_training(StreamWithMethods(failing))


def refuse(samples: list[Any]) -> Any:
    raise StopIteration


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dataset", [Numbers(), EndingStream()], ids=["mapped", "stream"])
def test_a_collate_function_that_fails_names_the_samples(dataset: Any, workers: int) -> None:
    words = rf"^making a batch of samples (\d+, ){{3}}\d+ of \w+: StopIteration {FILE_AND_LINE}"
    for read in (read_training, read_evaluation):
        with pytest.raises(UserCodeError, match=words):
            read(dataset, workers=workers, collate=refuse)


def test_a_sample_that_is_none_is_named() -> None:
    samples = [torch.zeros(1)] * SIZE
    samples[BROKEN] = None  # type: ignore[call-overload]
    with pytest.raises(UserCodeError, match=rf"^sample {BROKEN} of Numbers is None: return a sample {FILE_AND_LINE}"):
        read_evaluation(Numbers(samples))
    assert len(read_evaluation(Numbers(samples), collate=as_list)) == 3, "a collate function may accept None"


def test_samples_of_different_shapes_are_named() -> None:
    samples = [torch.zeros(index) for index in range(SIZE)]
    where = r"^making a batch of samples 0, 1, 2, 3 of Numbers \(.*test_samples\.py, line \d+\)"
    words = where + r" \(samples of different sizes need data\.collate, .*\): RuntimeError: stack "
    with pytest.raises(UserCodeError, match=words):
        read_evaluation(Numbers(samples))


@pytest.mark.parametrize("length", [-3, 2.5, None, 10**30, 10**15, "12"])
def test_a_length_that_is_no_number_of_samples_is_refused(length: Any) -> None:
    words = rf"^the length of the data set Numbers is {re.escape(repr(length))}, but it must be .*{FILE_AND_LINE}"
    for read in (read_training, read_evaluation):
        with pytest.raises(UserCodeError, match=words):
            read(Numbers(length=length))


@pytest.mark.parametrize("raised", [ValueError, TypeError, StopIteration, SystemExit])
def test_a_length_that_fails_is_reported(raised: type[BaseException]) -> None:
    words = rf"^the length of data\.train: {raised.__name__}: .* {FILE_AND_LINE}"
    with pytest.raises(UserCodeError, match=words):
        dataset_size(Numbers(length=raised), "data.train")


def test_a_data_set_without_a_length_is_refused() -> None:
    for dataset in (Dataset[Any](), Numbers(length=NotImplementedError)):
        with pytest.raises(InputError, match="has no length: give it __len__"):
            dataset_size(dataset)


class Suicidal(Numbers):
    """A sample kills the process that reads it."""

    def __getitem__(self, index: int) -> Any:
        if index == BROKEN and multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_worker_that_dies_is_not_the_end_of_the_data() -> None:
    """processes/rank.py turns this into a sentence for users."""
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid.*\) (is killed by signal|exited unexpectedly)"):
        read_training(Suicidal(), workers=1)
