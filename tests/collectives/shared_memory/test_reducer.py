"""All-reduce in shared memory gives the sum in the order of the ranks, to the last bit, for any size, dtype and number
of ranks."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.collectives.shared_memory.reducer import Implementation, SharedMemoryReducer
from tests.collectives.ddp_hook import average_with
from tests.collectives.shared_memory.rank_sums import FLOATS, SIZES, rank_tensor, reference, same_bits
from tests.collectives.world_group import world_group
from tests.ranks import RankPool, run_ranks
from tests.soaked import all_but


def _all_sizes_and_dtypes(
    rank: int, world: int, implementation: Implementation | None, sizes: tuple[int, ...]
) -> list[str]:
    """Returns the cases whose result differs from the one of a single process."""
    wrong = []
    reducer = SharedMemoryReducer(world_group(), implementation=implementation)
    cases = [(size, dtype) for size in sizes for dtype in FLOATS]
    for seed in range(2):
        for number, (size, dtype) in enumerate(cases):
            flat = rank_tensor(rank, size, dtype, seed)
            reducer.start(flat, number)
            reducer.finish()
            if not same_bits(flat, reference([rank_tensor(r, size, dtype, seed) for r in range(world)])):
                wrong.append(f"{size} of {dtype}, seed {seed}")
    reducer.close()
    total = SharedMemoryReducer(world_group(), implementation=implementation, operation="sum")
    for dtype in (torch.int64, torch.float32):
        for size in sizes:
            flat = rank_tensor(rank, size, dtype)
            total.start(flat, 0)
            total.finish()
            if not same_bits(flat, reference([rank_tensor(r, size, dtype) for r in range(world)], mean=False)):
                wrong.append(f"sum of {size} of {dtype}")
    total.close()
    return wrong


@pytest.mark.parametrize("world", all_but([3], [1, 2, 3, 4, 5, 6, 7, 8]))
def test_mean_and_sum_to_the_last_bit(world: int) -> None:
    """The worlds include some with more ranks than cores."""
    assert run_ranks(_all_sizes_and_dtypes, world, "compiled", SIZES) == [[]] * world


@pytest.mark.soak
@pytest.mark.parametrize("world", [2, 3, 5])
def test_large_tensors_to_the_last_bit(world: int) -> None:
    assert run_ranks(_all_sizes_and_dtypes, world, "compiled", (1_333_333,)) == [[]] * world


def test_the_steps_in_python_have_the_same_results(three: RankPool) -> None:
    """Where the processor reorders writes, the fence of the helper is called between memory and counters."""
    assert three.run(_all_sizes_and_dtypes, "python", SIZES) == [[]] * 3


def _special_values(rank: int, world: int) -> list[bool]:
    """Checks overflow, infinities, subnormal numbers, ties of rounding, and every 16-bit pattern. Returns
    whether each check passed."""
    checks = []
    reducer = SharedMemoryReducer(world_group())
    for dtype in (torch.float16, torch.bfloat16):
        patterns = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
        every_number = patterns.view(dtype)
        shifted = [patterns.roll(9973 * r).view(dtype) for r in range(world)]
        flat = shifted[rank].clone()
        reducer.start(flat, 0)
        reducer.finish()
        expected = reference(shifted)
        numbers = ~expected.isnan()
        checks += [same_bits(flat[numbers], expected[numbers]), bool(flat[~numbers].isnan().all())]
        only_on_rank_0 = every_number.clone() if rank == 0 else torch.zeros_like(every_number)
        reducer.start(only_on_rank_0, 1)
        reducer.finish()
        expected = reference([every_number, *[torch.zeros_like(every_number)] * (world - 1)])
        numbers = ~expected.isnan()
        checks.append(same_bits(only_on_rank_0[numbers], expected[numbers]))
    huge = torch.full((20_000,), 60_000.0, dtype=torch.float16)
    reducer.start(huge, 2)
    reducer.finish()
    checks.append(bool((huge == 60_000.0).all()))
    reducer.close()
    return checks


@pytest.mark.parametrize("world", [2, 3])
def test_every_16_bit_number_is_averaged_exactly(world: int) -> None:
    for checks in run_ranks(_special_values, world):
        assert all(checks), checks


def _scatter_and_gather(rank: int, world: int, implementation: Implementation | None) -> list[str]:
    wrong = []
    reducer = SharedMemoryReducer(world_group(), implementation=implementation)
    for size in (0, 1, 7, 1000, 20_003):
        for dtype in (torch.float32, torch.bfloat16):
            tensors = [rank_tensor(r, size, dtype) for r in range(world)]
            flat = rank_tensor(rank, size, dtype)
            rank_slice = reducer.reduce_scatter(flat, 0)
            begin, end = reducer.bounds(flat)
            expected = tensors[rank].clone()
            expected[begin:end] = reference(tensors, mean=False)[begin:end]
            if not same_bits(flat, expected) or rank_slice.numel() != end - begin:
                wrong.append(f"reduce-scatter of {size} {dtype}")
            rank_slice.mul_(2)  # as if another machine had added the same numbers
            reducer.all_gather(flat, 0)
            if not same_bits(flat, reference(tensors, mean=False) * 2):
                wrong.append(f"all-gather of {size} {dtype}")
    reducer.close()
    return wrong


@pytest.mark.parametrize("implementation", ["compiled", "python"])
def test_reduce_scatter_and_all_gather(three: RankPool, implementation: Implementation) -> None:
    assert three.run(_scatter_and_gather, implementation) == [[]] * 3


def _compare_ddp_with_gloo(rank: int, world: int) -> list[str]:
    """Returns the parameters whose gradients or weights differ from those of DDP without a hook."""
    wrong = []
    for unused in (False, True):
        models = []
        for _ in range(2):
            torch.manual_seed(1)
            hidden = [layer for _ in range(3) for layer in (nn.Linear(200, 200), nn.ReLU())]
            layers = nn.Sequential(nn.Linear(40, 200), *hidden, nn.Linear(200, 5))
            models.append(
                DistributedDataParallel(
                    layers, bucket_cap_mb=0.1, gradient_as_bucket_view=True, find_unused_parameters=unused
                )
            )
        reducer = SharedMemoryReducer(world_group())
        average_with(models[1], reducer)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
        for step in range(5):
            inputs = rank_tensor(rank, 8 * 40, torch.float32, step).view(8, 40)
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
            for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
                assert a.grad is not None
                assert b.grad is not None
                if not same_bits(a.grad, b.grad) or not same_bits(a.detach(), b.detach()):
                    wrong.append(f"step {step}: {name}")
        if reducer._started < 15:
            wrong.append(f"only {reducer._started} buckets went through shared memory")
        reducer.close()
    return wrong


def test_ddp_in_shared_memory_has_the_gradients_of_gloo(two: RankPool) -> None:
    """With two ranks the gradients have the same bits, because dividing by two is exact."""
    assert two.run(_compare_ddp_with_gloo) == [[], []]
