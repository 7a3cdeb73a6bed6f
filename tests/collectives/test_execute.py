"""Ranks that run a schedule end with the bits of the sequential reference, in every dtype and size."""

import random
from collections.abc import Sequence
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.collectives.execute import SEGMENT_BYTES, Execution
from meshwright.collectives.schedules.builders import SCHEDULES, build
from meshwright.collectives.schedules.schedule import Schedule, Send
from tests.collectives.sequential_reference import run_sequentially
from tests.collectives.world_group import world_group
from tests.ranks import RankPool, ranks

Dtypes = Sequence[torch.dtype]

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 7, 1000, 30_011)
NODES = {1: [1], 2: [1, 1], 3: [1, 2], 4: [2, 2], 5: [3, 2], 8: [3, 1, 4]}


def random_tensors(count: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(size)
    values = [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(count)]
    return [(100 * value).to(dtype) for value in values]


@cache
def first_ranks(count: int) -> dist.ProcessGroup:
    return dist.new_group(range(count))


def compare_schedules(
    rank: int, world: int, count: int, names: Sequence[str], sizes: Sequence[int], dtypes: Dtypes, segment_bytes: int
) -> int:
    """Compares all schedules on the first `count` ranks, and returns the number of cases."""
    group = first_ranks(count)
    return sum(compare_schedule(group, name, sizes, dtypes, segment_bytes) for name in names) if rank < count else 0


def compare_schedule(
    group: dist.ProcessGroup, name: str, sizes: Sequence[int], dtypes: Dtypes, segment_bytes: int
) -> int:
    """Compares the sums of this rank with those of the sequential reference, and returns the number of cases."""
    rank, world = group.rank(), group.size()
    schedule = build(name, world, NODES[world])
    execution = Execution(schedule, group, segment_bytes)
    cases = 0
    for size in sizes:
        for dtype in dtypes:
            inputs = random_tensors(world, size, dtype)
            result, exact = inputs[rank].clone(), torch.stack(inputs).double().sum(0)
            run_sequentially(schedule, inputs)
            execution.run(result)
            assert all(torch.equal(inputs[0], tensor) for tensor in inputs), "ranks of the reference differ"
            assert torch.equal(result, inputs[rank]), (name, size, dtype)
            # Each addition rounds a sum that is at most as large as the sum of all magnitudes.
            rounding = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
            largest = torch.stack(random_tensors(world, size, dtype)).double().abs().sum(0)
            assert bool(((result.double() - exact).abs() <= world * rounding * largest).all()), (name, size, dtype)
            cases += 1
    return cases


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_ranks_agree_with_the_sequential_reference(four: RankPool, count: int) -> None:
    cases = four.run(compare_schedules, count, SCHEDULES, (1, 7, 1001), (torch.float32, torch.bfloat16), 1024)
    assert cases == [6 * len(SCHEDULES)] * count + [0] * (4 - count)


@pytest.mark.soak
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
def test_every_dtype_and_size_agrees_with_the_sequential_reference(world: int) -> None:
    with ranks(world) as pool:
        for segment_bytes in (4096, SEGMENT_BYTES):
            cases = pool.run(compare_schedules, world, SCHEDULES, SIZES, (*FLOATS, torch.int64), segment_bytes)
            assert set(cases) == {len(SCHEDULES) * len(SIZES) * (len(FLOATS) + 1)}


@pytest.mark.soak
@pytest.mark.parametrize("world", [2, 4])
def test_large_tensors_agree_with_the_sequential_reference(world: int) -> None:
    with ranks(world) as pool:
        cases = pool.run(compare_schedules, world, SCHEDULES, (9_000_001,), (torch.float32,), SEGMENT_BYTES)
        assert set(cases) == {len(SCHEDULES)}


def random_schedule(seed: int, world: int) -> Schedule:
    """Returns a valid schedule that is no all-reduce. Chunks that a rank has sent may be overwritten by ranks that do
    not depend on that send."""
    generator = random.Random(seed)
    rounds = []
    for _ in range(6):
        sends: dict[tuple[int, int], Send] = {}
        read: set[tuple[int, int]] = set()
        for _ in range(6):
            source, target = generator.sample(range(world), 2)
            chunk = generator.randrange(3)
            free = (target, chunk) not in sends and (target, chunk) not in read and (source, chunk) not in sends
            if free:
                sends[target, chunk] = Send(source, target, chunk, "add" if generator.random() < 0.5 else "copy")
                read.add((source, chunk))
        rounds.append(tuple(sends.values()))
    return Schedule(f"random {seed}", world, 3, tuple(rounds))


def differing_schedules(rank: int, world: int, seeds: int) -> list[int]:
    """Returns the seeds of the random schedules whose result is not that of the sequential reference on this rank."""
    differing = []
    for seed in range(seeds):
        schedule = random_schedule(seed, world)
        inputs = random_tensors(world, 200, torch.float32)
        result = inputs[rank].clone()
        run_sequentially(schedule, inputs)
        Execution(schedule, world_group(), 64).run(result)
        if not torch.equal(result, inputs[rank]):
            differing.append(seed)
    return differing


def test_any_schedule_runs_as_the_sequential_reference(four: RankPool) -> None:
    assert four.run(differing_schedules, 12) == [[]] * 4


def sum_in_half_of_the_ranks(rank: int, world: int) -> list[float]:
    halves = [dist.new_group([1, 3]), dist.new_group([0, 2])]
    group = halves[(rank + 1) % 2]
    flat = torch.full((10,), float(rank))
    Execution(build("ring", 2, [2]), group).run(flat)
    return flat.tolist()


def test_ranks_of_a_schedule_are_those_of_the_group(four: RankPool) -> None:
    assert four.run(sum_in_half_of_the_ranks) == [[2.0] * 10, [4.0] * 10, [2.0] * 10, [4.0] * 10]


def sum_view(rank: int, world: int) -> tuple[float, float, float]:
    whole = torch.full((100,), float(rank + 1))
    Execution(build("tree", world, [world]), world_group()).run(whole[10:90])
    return whole[9].item(), whole[10].item(), whole[90].item()


def test_only_the_elements_of_the_view_change(four: RankPool) -> None:
    assert four.run(sum_view) == [(rank, 10.0, rank) for rank in (1.0, 2.0, 3.0, 4.0)]
