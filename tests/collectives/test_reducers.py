"""Each algorithm of a plan has its reducer, for ranks on one machine and on two."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from meshwright.collectives.native import NativeReducer
from meshwright.collectives.reducers import make_reducer
from meshwright.collectives.scheduled import ScheduledReducer
from meshwright.collectives.shared_memory import segment
from meshwright.collectives.shared_memory.reducer import SharedMemoryReducer
from meshwright.collectives.shared_memory.two_level import TwoLevelMemoryReducer, machines_of
from meshwright.collectives.small_sums import make_small_sums
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.plan_rules.table import check_rules
from tests.collectives.world_group import world_group
from tests.ranks import RankPool

CPU = torch.device("cpu")
REDUCER_CLASSES: dict[str, type] = {
    "native": NativeReducer,
    "ring": ScheduledReducer,
    "tree": ScheduledReducer,
    "halving_doubling": ScheduledReducer,
    "two_level": ScheduledReducer,
    "shared_memory": SharedMemoryReducer,
    "auto": SharedMemoryReducer,
}


def average_buckets(rank: int, size: int, name: Any) -> tuple[str, list[float]]:
    reducer, reason = make_reducer(name, world_group(), CPU)
    assert reason is None
    buckets = [torch.full((count,), float(rank + number)) for number, count in enumerate((5, 0, 10_001))]
    for number, bucket in enumerate(buckets):
        reducer.start(bucket, number)
    reducer.finish()
    reducer.close()
    assert all(torch.allclose(bucket, bucket[:1]) for bucket in buckets)
    return type(reducer).__name__, [float(bucket[0]) for bucket in buckets if bucket.numel()]


@pytest.mark.parametrize("name", REDUCER_CLASSES)
def test_every_name_makes_its_reducer(three: RankPool, name: str) -> None:
    for kind, averages in three.run(average_buckets, name):
        assert kind == REDUCER_CLASSES[name].__name__
        assert averages == pytest.approx([1.0, 3.0])


@contextmanager
def on_machines(rank: int, table: str) -> Iterator[list[list[int]]]:
    """As if rank r were on the machine that the letter r of the table names. Yields the ranks of each machine."""
    original = segment.this_process
    segment.this_process = lambda: replace(original(), namespace=table[rank])
    try:
        yield [[r for r, name in enumerate(table) if name == machine] for machine in sorted(set(table))]
    finally:
        segment.this_process = original


def reduce_on_two_machines(rank: int, size: int, table: str) -> tuple[str, list[bool]]:
    """Returns the kind of the reducer of `auto`, and whether the result of each step was right."""
    with on_machines(rank, table) as machines:
        assert machines_of(world_group()) == machines
        memory, reason = make_reducer("auto", world_group(), CPU)
        if reason is not None:
            return reason, []
        results = []
        for step in range(3):
            buckets = [torch.arange(4001.0) * (rank + 1) + step, torch.full((3,), float(rank))]
            for number, bucket in enumerate(buckets):
                memory.start(bucket, number)
            memory.finish()
            expected = torch.arange(4001.0) * 2.5 + step
            results.append(bool(torch.allclose(buckets[0], expected)) and buckets[1].tolist() == [1.5] * 3)
        memory.close()
        return type(memory).__name__, results


@pytest.mark.parametrize("table", ["aabb", "abab"])
def test_between_machines_memory_is_shared_within_each(four: RankPool, table: str) -> None:
    assert four.run(reduce_on_two_machines, table) == [("TwoLevelMemoryReducer", [True] * 3)] * 4


def test_with_unequal_machines_auto_uses_the_backend_and_says_why(four: RankPool) -> None:
    for reason, _ in four.run(reduce_on_two_machines, "aaab"):
        assert reason.startswith("machines with 3, 1 ranks cannot combine slices")


def test_machines_with_two_and_three_ranks_are_refused() -> None:
    with pytest.raises(InputError, match=r"^machines with 2, 3 ranks cannot combine slices"):
        TwoLevelMemoryReducer(Mock(), [[0, 1], [2, 3, 4]])


def send_on_two_levels(rank: int, size: int, table: str) -> tuple[bool, list[list[tuple[int, int, int]]]]:
    """Returns whether the mean was right, and the messages of each round: source, target and chunk."""
    with on_machines(rank, table):
        reducer, _ = make_reducer("two_level", world_group(), CPU)
    assert isinstance(reducer, ScheduledReducer)
    bucket = torch.arange(997.0) * (rank + 1)
    reducer.start(bucket, 0)
    reducer.finish()
    reducer.close()
    rounds = [[(s.source, s.target, s.chunk) for s in sends] for sends in reducer.schedule.rounds]
    return bool(torch.allclose(bucket, torch.arange(997.0) * 2.5)), rounds


@pytest.mark.parametrize("table", ["aabb", "abab", "abba", "aaab", "baaa"])
def test_two_levels_are_the_machines_whatever_their_ranks_are(four: RankPool, table: str) -> None:
    for is_mean, rounds in four.run(send_on_two_levels, table):
        assert is_mean
        crossing = [{table[source] != table[target] for source, target, _ in sends} for sends in rounds if sends]
        levels = [is_across for is_across, _ in groupby(crossing)]
        assert levels == [{False}, {True}, {False}]  # within machines, between them, within them
        sent = Counter(
            table[source] for sends in rounds for source, target, _ in sends if table[source] != table[target]
        )
        chunks = 1 + max(chunk for sends in rounds for _, _, chunk in sends)
        assert sent == {"a": chunks, "b": chunks}  # 2(m - 1)/m of the tensor from each of the m = 2 machines


def list_machines(rank: int, size: int) -> list[list[int]]:
    return machines_of(world_group())


def test_ranks_of_one_machine_are_recognized(three: RankPool) -> None:
    assert three.run(list_machines) == [[[0, 1, 2]]] * 3


def choose_for_gpu(rank: int, size: int) -> str:
    """Returns the reducer that is chosen for GPUs."""
    return type(make_reducer("auto", world_group(), torch.device("cuda"))[0]).__name__


def test_gpus_use_the_all_reduce_of_the_backend(two: RankPool) -> None:
    assert two.run(choose_for_gpu) == ["NativeReducer"] * 2
    ring = Plan.model_validate({"axes": {"replicate": 2}, "gradients": {"algorithm": "ring"}})
    with pytest.raises(InputError, match="choose native"):
        check_rules(ring, device="cuda")


def choose_with_too_little_memory(rank: int, size: int) -> list[str]:
    """Returns the chosen reducer, the reason, and the error. Only rank 1 has too little memory; all ranks choose the
    same."""
    reducer, reason = make_reducer("auto", world_group(), CPU, 2**60 if rank == 1 else 0)
    try:
        make_reducer("shared_memory", world_group(), CPU, 2**60 if rank == 1 else 0)
    except InputError as error:
        return [type(reducer).__name__, str(reason), str(error)]
    return []


def test_too_little_shared_memory_is_reported_before_anything_is_moved(three: RankPool) -> None:
    for kind, reason, error in three.run(choose_with_too_little_memory):
        assert kind == "NativeReducer"
        for text in (reason, error):  # other programs may change the number of free bytes between the two
            assert "free, and 3 ranks need 3 EiB there (a container gets more with --shm-size)" in text


def reduce_on_macos(rank: int, size: int) -> list[Any]:
    """Returns the reducer and the reason of `auto`, the error of `shared_memory`, and the kind of small sums, as if the
    ranks ran on macOS; a ring works there, too."""
    system, sys.platform = sys.platform, "darwin"
    try:
        reducer, reason = make_reducer("auto", world_group(), CPU)
        with pytest.raises(InputError) as error:
            make_reducer("shared_memory", world_group(), CPU)
        ring, _ = make_reducer("ring", world_group(), CPU)
        bucket = torch.full((5,), float(rank))
        ring.start(bucket, 0)
        ring.finish()
        ring.close()
        assert bucket.tolist() == [0.5] * 5
        sums = make_small_sums("auto", world_group(), CPU)
        return [type(reducer).__name__, reason, str(error.value), type(sums).__name__]
    finally:
        sys.platform = system


def test_macos_has_no_shared_memory_and_uses_the_backend(two: RankPool) -> None:
    reason = (
        "gradients cannot be combined in shared memory: ranks open each other's memory through Linux's /proc, which"
        " darwin does not have"
    )
    for result in two.run(reduce_on_macos):
        assert result == ["NativeReducer", reason, reason, "NativeSmallSums"]
