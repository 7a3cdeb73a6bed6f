"""Reducers by the names that plans give them, between ranks of one machine and between those of two."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.collectives import reducers
from meshwright.collectives.native import Native
from meshwright.collectives.reducers import make_reducer
from meshwright.collectives.scheduled import Scheduled
from meshwright.collectives.shared_memory import two_level as two_level_memory
from meshwright.collectives.shared_memory.reducer import SharedMemory
from meshwright.collectives.shared_memory.two_level import TwoLevelMemory, machines_of
from meshwright.errors import InputError
from tests.ranks import RankPool

CPU = torch.device("cpu")
NAMES: dict[str, type] = {
    "native": Native,
    "ring": Scheduled,
    "tree": Scheduled,
    "halving_doubling": Scheduled,
    "two_level": Scheduled,
    "shared_memory": SharedMemory,
    "auto": SharedMemory,
}


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def means(rank: int, size: int, name: Any) -> tuple[str, list[float]]:
    reducer, why = make_reducer(name, world(), CPU)
    assert why is None
    buckets = [torch.full((count,), float(rank + number)) for number, count in enumerate((5, 0, 10_001))]
    for number, bucket in enumerate(buckets):
        reducer.start(bucket, number)
    reducer.finish()
    reducer.close()
    assert all(torch.allclose(bucket, bucket[:1]) for bucket in buckets)
    return type(reducer).__name__, [float(bucket[0]) for bucket in buckets if bucket.numel()]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_makes_the_reducer_that_it_says(three: RankPool, name: str) -> None:
    for kind, found in three.run(means, name):
        assert kind == NAMES[name].__name__
        assert found == pytest.approx([1.0, 3.0])


def apart(rank: int, size: int) -> list[Any]:
    """Ranks that believe to be on two machines."""
    own = two_level_memory.machines_of
    try:
        reducers.machines_of = lambda group: [[0, 1], [2, 3]]
        memory, _ = make_reducer("auto", world(), CPU)
        assert isinstance(memory, TwoLevelMemory)
        found: list[Any] = []
        for step in range(3):
            buckets = [torch.arange(4001.0) * (rank + 1) + step, torch.full((3,), float(rank))]
            for number, bucket in enumerate(buckets):
                memory.start(bucket, number)
            memory.finish()
            expected = torch.arange(4001.0) * 2.5 + step
            found.append(bool(torch.allclose(buckets[0], expected)) and buckets[1].tolist() == [1.5] * 3)
        memory.close()
        reducers.machines_of = lambda group: [[0, 1, 2], [3]]
        fallback, why = make_reducer("auto", world(), CPU)
        found += [type(fallback).__name__, why]
        reducers.machines_of = lambda group: [[0, 2], [1, 3]]
        try:
            make_reducer("two_level", world(), CPU)
        except InputError as error:
            found.append(str(error))
        return found
    finally:
        reducers.machines_of = own


def test_between_machines_memory_is_shared_within_each(four: RankPool) -> None:
    for found in four.run(apart):
        assert found[:4] == [True, True, True, "Native"]
        assert found[4].startswith("machines with 3, 1 ranks cannot combine slices")
        assert "numbered machine by machine" in found[5]


def here(rank: int, size: int) -> list[list[int]]:
    return machines_of(world())


def test_ranks_of_one_machine_know_it(three: RankPool) -> None:
    assert three.run(here) == [[[0, 1, 2]]] * 3


def on_a_gpu(rank: int, size: int) -> tuple[str, str]:
    gpu = torch.device("cuda")
    kind = type(make_reducer("auto", world(), gpu)[0]).__name__
    try:
        make_reducer("ring", world(), gpu)
    except InputError as error:
        return kind, str(error)
    return kind, ""


def test_gpus_combine_natively(two: RankPool) -> None:
    for kind, said in two.run(on_a_gpu):
        assert kind == "Native"
        assert "choose native" in said


def little_room(rank: int, size: int) -> list[str]:
    """On one rank alone: all of them do the same."""
    kind, why = make_reducer("auto", world(), CPU, 2**60 if rank == 1 else 0)
    try:
        make_reducer("shared_memory", world(), CPU, 2**60 if rank == 1 else 0)
    except InputError as error:
        return [type(kind).__name__, str(why), str(error)]
    return []


def test_shared_memory_that_is_too_small_is_told_before_anything_is_moved(three: RankPool) -> None:
    for kind, why, error in three.run(little_room):
        assert kind == "Native"
        assert why == error
        assert "MiB free, and 3 ranks need 3298534883328 MiB there (a container gets more with --shm-size)" in why
