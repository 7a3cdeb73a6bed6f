"""Any number of buckets may be pending, over any number of steps, and peers unmap the memory of freed tensors."""

import pytest
import torch

from meshwright.collectives.shared_memory.reducer import Implementation, SharedMemoryReducer
from meshwright.collectives.shared_memory.segment import RING, SLOTS
from meshwright.collectives.shared_memory.steps import (
    STAGE_UP_TO_BYTES,
)
from tests.collectives.shared_memory.rank_sums import rank_tensor, reference, same_bits
from tests.collectives.world_group import world_group
from tests.ranks import RankPool, run_ranks


def _many_steps(rank: int, world: int, implementation: Implementation | None, steps: int) -> list[str]:
    """Runs several buckets at the same time: reused and new tensors, views into a larger storage, small and large
    ones. Returns what was wrong."""
    wrong = []
    reducer = SharedMemoryReducer(world_group(), implementation=implementation)
    storage = torch.zeros(40_000)
    reused = [torch.zeros(20_011), storage[3:10_007], torch.zeros(50), storage[20_000:40_000], torch.zeros(9000)]
    for step in range(steps):
        new = [torch.empty(5000 + 1000 * (step % 3)) for _ in range(step % 4)]
        flats = [*reused, *new]
        flats = flats[step % len(flats) :] + flats[: step % len(flats)]
        for bucket, flat in enumerate(flats):
            flat.copy_(rank_tensor(rank, flat.numel(), flat.dtype, step + bucket))
            reducer.start(flat, bucket)
        reducer.finish()
        for bucket, flat in enumerate(flats):
            expected = reference([rank_tensor(r, flat.numel(), flat.dtype, step + bucket) for r in range(world)])
            if not same_bits(flat, expected):
                wrong.append(f"step {step}, bucket {bucket}")
        if storage[10_007:20_000].any() or storage[:3].any():
            wrong.append(f"step {step}: elements outside of the view were written")
    reducer.close()
    return wrong


@pytest.mark.parametrize("implementation", ["compiled", "python"])
def test_many_pending_buckets_over_many_steps(three: RankPool, implementation: Implementation) -> None:
    assert three.run(_many_steps, implementation, 12) == [[]] * 3


@pytest.mark.soak
@pytest.mark.parametrize("world", [2, 4, 8])
def test_many_pending_buckets_over_very_many_steps(world: int) -> None:
    assert run_ranks(_many_steps, world, "compiled", 100) == [[]] * world


def _fill_more_than_the_ring(rank: int, world: int, implementation: Implementation | None) -> bool:
    reducer = SharedMemoryReducer(world_group(), implementation=implementation)
    flats = [torch.full((size,), float(rank + number)) for number, size in enumerate([10, 6000] * (RING + 5))]
    for number, flat in enumerate(flats):
        reducer.start(flat, number)
    reducer.finish()
    reducer.close()
    return all(bool((flat == number + (world - 1) / 2).all()) for number, flat in enumerate(flats))


@pytest.mark.parametrize("implementation", ["compiled", "python"])
def test_more_pending_buckets_than_the_ring_holds(two: RankPool, implementation: Implementation) -> None:
    assert two.run(_fill_more_than_the_ring, implementation) == [True, True]


def _count_mappings(rank: int, world: int, implementation: Implementation | None) -> tuple[bool, list[int], list[int]]:
    """Returns whether all results were right, the fewest and most mappings while each tensor was freed after its step,
    and the number of mappings and storages while more tensors were alive than there are slots."""
    reducer = SharedMemoryReducer(world_group(), implementation=implementation)
    correct, mappings = True, []
    for step in range(2 * SLOTS + 10):
        flat = torch.full((STAGE_UP_TO_BYTES // 4 + 1 + step,), float(step + rank))
        reducer.start(flat, 0)
        reducer.finish()
        correct = correct and bool((flat == step + (world - 1) / 2).all())
        mappings.append(reducer._steps.mappings())
    live_tensors = [torch.full((STAGE_UP_TO_BYTES // 4 + 1,), float(rank)) for _ in range(SLOTS + 20)]
    for flat in live_tensors * 2:
        flat.fill_(float(rank))
        reducer.start(flat, 0)
        reducer.finish()
        correct = correct and bool((flat == (world - 1) / 2).all())
    final_counts = [reducer._steps.mappings(), len(reducer._storages)]
    reducer.close()
    return correct, [min(mappings[1:]), max(mappings)], final_counts


@pytest.mark.parametrize("implementation", ["compiled", "python"])
def test_peers_unmap_freed_tensors(two: RankPool, implementation: Implementation) -> None:
    for correct, (fewest, most), (mappings, storages) in two.run(_count_mappings, implementation):
        assert correct
        assert fewest >= 1
        assert most <= 3
        assert mappings <= storages <= SLOTS
