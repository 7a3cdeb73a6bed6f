"""Each algorithm of a plan has its reducer, for ranks on one machine and on two."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.collectives import reducers
from meshwright.collectives.native import NativeReducer
from meshwright.collectives.reducers import make_reducer
from meshwright.collectives.scheduled import ScheduledReducer
from meshwright.collectives.shared_memory import two_level as two_level_memory
from meshwright.collectives.shared_memory.reducer import SharedMemoryReducer
from meshwright.collectives.shared_memory.two_level import TwoLevelMemoryReducer, machines_of
from meshwright.errors import InputError
from tests.ranks import RankPool

CPU = torch.device("cpu")
NAMES: dict[str, type] = {
    "native": NativeReducer,
    "ring": ScheduledReducer,
    "tree": ScheduledReducer,
    "halving_doubling": ScheduledReducer,
    "two_level": ScheduledReducer,
    "shared_memory": SharedMemoryReducer,
    "auto": SharedMemoryReducer,
}


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def means(rank: int, size: int, name: Any) -> tuple[str, list[float]]:
    reducer, reason = make_reducer(name, world(), CPU)
    assert reason is None
    buckets = [torch.full((count,), float(rank + number)) for number, count in enumerate((5, 0, 10_001))]
    for number, bucket in enumerate(buckets):
        reducer.start(bucket, number)
    reducer.finish()
    reducer.close()
    assert all(torch.allclose(bucket, bucket[:1]) for bucket in buckets)
    return type(reducer).__name__, [float(bucket[0]) for bucket in buckets if bucket.numel()]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_makes_its_reducer(three: RankPool, name: str) -> None:
    for kind, averages in three.run(means, name):
        assert kind == NAMES[name].__name__
        assert averages == pytest.approx([1.0, 3.0])


def on_two_machines(rank: int, size: int) -> list[Any]:
    """Makes reducers for ranks as if they were on two machines."""
    original = two_level_memory.machines_of
    try:
        reducers.machines_of = lambda group: [[0, 1], [2, 3]]
        memory, _ = make_reducer("auto", world(), CPU)
        assert isinstance(memory, TwoLevelMemoryReducer)
        results: list[Any] = []
        for step in range(3):
            buckets = [torch.arange(4001.0) * (rank + 1) + step, torch.full((3,), float(rank))]
            for number, bucket in enumerate(buckets):
                memory.start(bucket, number)
            memory.finish()
            expected = torch.arange(4001.0) * 2.5 + step
            results.append(bool(torch.allclose(buckets[0], expected)) and buckets[1].tolist() == [1.5] * 3)
        memory.close()
        reducers.machines_of = lambda group: [[0, 1, 2], [3]]
        fallback, reason = make_reducer("auto", world(), CPU)
        results += [type(fallback).__name__, reason]
        reducers.machines_of = lambda group: [[0, 2], [1, 3]]
        try:
            make_reducer("two_level", world(), CPU)
        except InputError as error:
            results.append(str(error))
        return results
    finally:
        reducers.machines_of = original


def test_between_machines_memory_is_shared_within_each(four: RankPool) -> None:
    for results in four.run(on_two_machines):
        assert results[:4] == [True, True, True, "NativeReducer"]
        assert results[4].startswith("machines with 3, 1 ranks cannot combine slices")
        assert "numbered machine by machine" in results[5]


def machines(rank: int, size: int) -> list[list[int]]:
    return machines_of(world())


def test_ranks_of_one_machine_are_recognized(three: RankPool) -> None:
    assert three.run(machines) == [[[0, 1, 2]]] * 3


def on_a_gpu(rank: int, size: int) -> tuple[str, str]:
    gpu = torch.device("cuda")
    kind = type(make_reducer("auto", world(), gpu)[0]).__name__
    try:
        make_reducer("ring", world(), gpu)
    except InputError as error:
        return kind, str(error)
    return kind, ""


def test_gpus_combine_natively(two: RankPool) -> None:
    for kind, message in two.run(on_a_gpu):
        assert kind == "NativeReducer"
        assert "choose native" in message


def with_too_little_memory(rank: int, size: int) -> list[str]:
    """Only rank 1 has too little memory, and all ranks do the same."""
    reducer, reason = make_reducer("auto", world(), CPU, 2**60 if rank == 1 else 0)
    try:
        make_reducer("shared_memory", world(), CPU, 2**60 if rank == 1 else 0)
    except InputError as error:
        return [type(reducer).__name__, str(reason), str(error)]
    return []


def test_too_little_shared_memory_is_reported_before_anything_is_moved(three: RankPool) -> None:
    for kind, reason, error in three.run(with_too_little_memory):
        assert kind == "NativeReducer"
        assert reason == error
        assert "MiB free, and 3 ranks need 3298534883328 MiB there (a container gets more with --shm-size)" in reason
