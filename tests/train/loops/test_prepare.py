"""`session.prepare`: batch k of a user's loader on one process is the global batch k on any number of ranks."""

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

import meshwright as mw
from meshwright.data.batch import SampleShare
from meshwright.data.prepared import PreparedLoader
from meshwright.errors import InputError
from meshwright.train.session import Session
from tests.ranks import RankPool
from tests.train.loops.models import assert_close, model, pairs, shuffled
from tests.train.one_process import toy_job, train

SIZE = 13


def session_on(size: int, axes: dict[str, int] | None = None, **options: Any) -> Session:
    module = model(5, 4)
    template = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    plan = {"axes": axes or {"replicate": size}}
    return mw.parallelize(module, template, loss=F.mse_loss, plan=plan, device="cpu", **options)


# ---- which samples a rank gets


class Numbers(Dataset[int]):
    offset = 0

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index + self.offset


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))


def double(samples: list[int]) -> Tensor:
    return 2 * torch.tensor(samples)


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def loader_of(kind: str) -> "DataLoader[Any]":
    torch.manual_seed(11)
    data = Numbers()
    if kind == "shuffled by the default generator":
        return DataLoader(data, 4, shuffle=True)
    if kind == "shuffled by its own generator":
        return DataLoader(data, 5, shuffle=True, generator=torch.Generator().manual_seed(2), collate_fn=double)
    if kind == "weighted":
        return DataLoader(data, 4, sampler=WeightedRandomSampler([float(i) for i in range(SIZE)], 10))
    if kind == "batch sampler":
        return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 6, drop_last=False))
    if kind == "drop_last":
        return DataLoader(data, 4, shuffle=True, drop_last=True)
    assert kind == "stream"
    return DataLoader(Stream(), 4)


KINDS = [
    "shuffled by the default generator",
    "shuffled by its own generator",
    "weighted",
    "batch sampler",
    "stream",
]


def shares(rank: int, size: int, kind: str, seed_differs: bool) -> tuple[list[list[list[int]]], list[float], int]:
    """This rank's samples of each batch of two epochs (without borrowed ones), and random numbers that are drawn in
    between."""
    session = session_on(size)
    loader = loader_of(kind)
    if seed_differs:
        torch.manual_seed(rank)
    batches = session.prepare(loader)
    drawn, epochs = [], []
    for _ in range(2):
        # A rank without a sample gets one of another rank, so that it can take part in the step.
        epochs.append([data.tolist() if batches.samples else [] for data in batches])
        drawn.append(float(torch.rand(())))
    return epochs, drawn, 0 if kind == "stream" else len(batches)


@pytest.mark.parametrize("kind", KINDS)
def test_the_shares_of_all_ranks_are_the_batches_of_one_process(three: RankPool, kind: str) -> None:
    loader = loader_of(kind)
    expected, drawn = [], []
    for _ in range(2):
        expected.append([data.tolist() for data in loader])
        drawn.append(float(torch.rand(())))
    results = three.run(shares, kind, False)
    for epoch, batches in enumerate(expected):
        found = [joined(parts) for parts in zip(*(result[0][epoch] for result in results), strict=True)]
        assert found == batches
    if kind != "stream":
        assert all(result[1] == drawn for result in results), "the loop draws the same numbers as on one process"
        assert all(result[2] == len(expected[0]) for result in results)


def test_ranks_with_different_seeds_follow_the_sampler_of_rank_0(three: RankPool) -> None:
    results = three.run(shares, "shuffled by the default generator", True)
    for epoch in range(2):
        samples = joined(joined(result[0][epoch]) for result in results)
        assert sorted(samples) == list(range(SIZE))


def open_files(worker: int) -> None:
    get_worker_info().dataset._dataset.offset = 100  # type: ignore[union-attr]


def test_worker_processes_load_the_shares() -> None:
    """Three ranks one after the other in this process: ranks of the pools may not start processes."""

    def shares_of(rank: int) -> list[list[int]]:
        torch.manual_seed(11)
        data = Numbers()
        loader = DataLoader(data, 4, shuffle=True, num_workers=2, drop_last=True, worker_init_fn=open_files)
        prepared = PreparedLoader(loader, SampleShare(rank, 3), 0, lambda: 0, lambda share: None, lambda batch: batch)
        return [share.tolist() for share in prepared]

    expected = [(100 + data).tolist() for data in loader_of("drop_last")]
    assert [joined(parts) for parts in zip(*map(shares_of, range(3)), strict=True)] == expected


class Noisy(Dataset[float]):
    """Adds random numbers to each sample."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> float:
        return index + float(torch.rand(()))


def augmented(rank: int, size: int) -> list[list[float]]:
    session = session_on(size)
    batches = session.prepare(DataLoader(Noisy(), 4, shuffle=True, generator=torch.Generator().manual_seed(0)))
    epochs = []
    for _ in range(2):
        epochs.append(joined(data.tolist() for data in batches if batches.samples))
        session.steps += 1
    return epochs


def test_augmentation_depends_on_the_sample_and_the_epoch_not_on_the_rank(two: RankPool) -> None:
    first, second = augmented(0, 1)
    results = two.run(augmented)
    assert sorted(first) == sorted(joined(result[0] for result in results))
    assert sorted(second) == sorted(joined(result[1] for result in results))
    assert {int(value): value for value in first} != {int(value): value for value in second}


# ---- training on them


def stepped(rank: int, size: int, axes: dict[str, int], accumulation: int) -> tuple[list[float], dict[str, Tensor]]:
    module = model(5, 4)
    template = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    plan = {"axes": axes, "memory": {"accumulation": accumulation}}
    session = mw.parallelize(module, template, loss=F.mse_loss, plan=plan, device="cpu")
    losses = [session.step(batch).item() for _ in range(2) for batch in session.prepare(shuffled(pairs()))]
    return losses, session.state_dict()


@pytest.mark.parametrize(
    ("axes", "accumulation"), [({"replicate": 3}, 1), ({"shard": 3}, 1), ({"shard": 3}, 2), ({"replicate": 3}, 3)]
)
def test_steps_on_a_prepared_loader(three: RankPool, axes: dict[str, int], accumulation: int) -> None:
    module = model(5, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(2):
        for inputs, target in shuffled(pairs()):
            optimizer.zero_grad()
            loss = F.mse_loss(module(inputs), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    for found, weights in three.run(stepped, axes, accumulation):
        assert_close(found, losses)
        assert_close(weights, module.state_dict())


# ---- refusals


def plain_loader(rank: int, size: int, method: str, differs: bool) -> str | None:
    """Loops over a loader without `prepare`. Returns the message of the error, or None."""
    data = pairs()
    sampler: Any = DistributedSampler(data, size, rank) if differs else None
    session = session_on(size)
    try:
        for batch in DataLoader(data, 4, sampler=sampler):
            getattr(session, method)(batch)
    except InputError as error:
        return str(error)
    return None


@pytest.mark.parametrize("method", ["step", "forward"])
def test_ranks_that_train_on_the_same_batch_are_refused(two: RankPool, method: str) -> None:
    for message in two.run(plain_loader, method, False):
        assert message.startswith(
            "all 2 data ranks were given the same first batch and would train on the same samples"
        )
        assert "session.prepare(loader)" in message


def test_a_loader_with_a_distributed_sampler_still_works(two: RankPool) -> None:
    assert two.run(plain_loader, "step", True) == [None, None]


def equal_samples(rank: int, size: int) -> int:
    session = session_on(size)
    session.step((torch.ones(4, 5, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64)))
    return session.steps


def test_batches_of_equal_samples_are_not_compared(two: RankPool) -> None:
    assert two.run(equal_samples) == [1, 1]


def unequal_batches(rank: int, size: int) -> str:
    sample = (torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64))
    module = model(5, 4)
    splits = {"blocks.0.0": {"kind": "column"}}
    plan = {"axes": {"tensor": 2}, "modules": {"splits": splits}}
    session = mw.parallelize(module, loss=F.mse_loss, plan=plan, device="cpu", sample_batch=sample)
    torch.manual_seed(rank)
    with pytest.raises(InputError) as error:
        session.step((torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)))
    return str(error.value)


def test_ranks_of_a_split_model_must_have_the_same_batch(two: RankPool) -> None:
    for message in two.run(unequal_batches):
        assert message.startswith("rank 1 has another batch than a rank that has to train on the same samples")


def test_a_loader_is_refused_where_a_data_set_is_expected() -> None:
    session = session_on(1)
    loader = DataLoader(pairs(), 4)
    with pytest.raises(InputError, match=r"loop over session\.prepare\(loader\) instead .*DataLoader of TensorDataset"):
        session.batches(loader)
    with pytest.raises(InputError, match=r"session\.evaluate takes a data set"):
        session.evaluate(loader)


class Names(Numbers):
    def __getitem__(self, index: Any) -> Any:
        return 0


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (pairs(), r"divides the batches of a torch DataLoader, and this is a TensorDataset"),
        (DataLoader(pairs(), None), r"batch_size=None, so its items are batches that cannot be divided"),
        (
            DataLoader(pairs(), 4, sampler=DistributedSampler(pairs(), 2, 0)),
            r"divides the data set among ranks already",
        ),
        (DataLoader(Names(), batch_sampler=[["a", "b"]]), r"list gave 'a' as the index of a sample"),
        (DataLoader(pairs(), batch_sampler=[[]]), r"list gave a batch without samples"),
    ],
)
def test_loaders_that_cannot_be_divided_are_refused(loader: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        next(iter(session_on(1).prepare(loader)))


# ---- data sets that differ between ranks


def unseeded(rank: int, size: int, use: str) -> str | None:
    torch.seed()
    data: Any = TensorDataset(torch.randn(8, 5, dtype=torch.float64), torch.zeros(8, 4, dtype=torch.float64))
    if use == "length":
        data = pairs(8 + rank)
    elif use == "random on each read":
        data = OwnGenerator()
    session = session_on(size)
    try:
        if use == "prepare":
            session.prepare(DataLoader(data, 4))
        else:
            session.batches(data, 1, 4)
    except InputError as error:
        return str(error)
    return None


class OwnGenerator(Dataset[Any]):
    """Draws from a generator that nobody seeds: each read of a sample is different."""

    def __init__(self) -> None:
        self._generator = torch.Generator()
        self._generator.seed()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.randn(5, generator=self._generator), torch.zeros(4)


@pytest.mark.parametrize("use", ["batches", "prepare"])
def test_a_data_set_that_is_built_with_unseeded_numbers_is_refused(two: RankPool, use: str) -> None:
    for message in two.run(unseeded, use):
        assert message.startswith("sample 0 of TensorDataset is not the same on ranks 0 and 1")
        assert "probably draws random numbers without a seed" in message


def test_data_sets_of_different_lengths_are_refused(two: RankPool) -> None:
    assert all("has 8 samples on rank 0 and 9 on rank 1" in message for message in two.run(unseeded, "length"))


def test_a_sample_that_is_random_on_each_read_is_not_compared(two: RankPool) -> None:
    assert two.run(unseeded, "random on each read") == [None, None]


def train_unseeded(rank: int, size: int, folder: Path) -> str:
    job = toy_job(data={"train": {"call": "tests.train.loops.models:unseeded_points", "size": 20}})
    with pytest.raises(InputError) as error:
        train(job, folder, rank=rank, size=size)
    return str(error.value)


def test_a_job_with_such_a_data_set_is_refused(two: RankPool, tmp_path: Path) -> None:
    for message in two.run(train_unseeded, tmp_path):
        assert message.startswith("sample 0 of TensorDataset is not the same on ranks 0 and 1")
