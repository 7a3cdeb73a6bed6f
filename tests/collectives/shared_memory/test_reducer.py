"""All-reduce in shared memory gives the sum in the order of the ranks, to the last bit, for any size, dtype and number
of ranks."""

import ctypes
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.collectives.reducer import Reducer
from meshwright.collectives.shared_memory import compiled_helper, segment
from meshwright.collectives.shared_memory.python_steps import PythonSteps
from meshwright.collectives.shared_memory.reducer import Implementation, SharedMemoryReducer
from meshwright.collectives.shared_memory.segment import RING, SLOTS, Descriptor
from meshwright.collectives.shared_memory.steps import (
    FINISHED,
    STAGE_UP_TO_BYTES,
    TYPES,
    WAITING,
    CollectiveSteps,
    CompiledSteps,
    slice_begin,
)
from meshwright.collectives.shared_memory.storages import SharedStorages
from meshwright.errors import CollectiveError, InputError
from tests.ranks import RankFailure, RankPool, run_ranks
from tests.soaked import all_but

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIZES = (0, 1, 7, 63, 64, 65, 1000, 4097, 16385, 100_003)


def rank_tensor(rank: int, size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Returns the tensor of a rank, which every rank can generate."""
    generator = torch.Generator().manual_seed(1000 * seed + 17 * size + rank)
    if dtype == torch.int64:
        return torch.randint(-(2**40), 2**40, (size,), generator=generator)
    return (torch.randn(size, generator=generator, dtype=torch.float64) * 10).to(dtype)


def reference(tensors: list[Tensor], *, mean: bool = True) -> Tensor:
    """Computes the expected result in one process."""
    sum_dtype = torch.float32 if tensors[0].dtype in (torch.bfloat16, torch.float16) else tensors[0].dtype
    total = tensors[0].to(sum_dtype, copy=True)
    for tensor in tensors[1:]:
        total += tensor.to(sum_dtype)
    return (total / len(tensors) if mean else total).to(tensors[0].dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _all_sizes_and_dtypes(
    rank: int, world: int, implementation: Implementation | None, sizes: tuple[int, ...]
) -> list[str]:
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
    """This includes more ranks than cores."""
    assert run_ranks(_all_sizes_and_dtypes, world, "compiled", SIZES) == [[]] * world


def _steps(
    implementation: Implementation, world: int, folder: Path | None = None
) -> list[tuple[CollectiveSteps, SharedStorages]]:
    """Returns the steps of ranks that are threads of this process, so that no processes need to be started."""
    helper = compiled_helper.load_helper(folder)
    assert isinstance(helper, ctypes.CDLL)
    segments = [segment.create_segment()[1] for _ in range(world)]
    pids = [os.getpid()] * world
    ranks: list[tuple[CollectiveSteps, SharedStorages]] = []
    for rank in range(world):
        steps = CompiledSteps(helper, rank, segments, pids) if implementation == "compiled" else None
        ranks.append((steps or PythonSteps(rank, segments, pids, helper.fence), SharedStorages(segments[rank])))
    return ranks


@pytest.mark.parametrize("implementation", ["compiled", "python"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
def test_the_steps_of_many_ranks(implementation: Implementation, world: int) -> None:
    ranks, cases = _steps(implementation, world), [(size, dtype) for size in SIZES for dtype in (*FLOATS, torch.int64)]

    def run_rank(rank: int) -> list[Tensor]:
        steps, storages = ranks[rank]
        flats = []
        for sequence, (size, dtype) in enumerate(cases, 1):
            flat = rank_tensor(rank, size, dtype)
            flats.append(flat)
            descriptor = Descriptor(count=size, type=TYPES[dtype], mean=dtype != torch.int64, bucket=sequence)
            descriptor.staged = size * flat.element_size() <= steps.stage_up_to_bytes or size == 0
            if not descriptor.staged:
                shared = storages.share(flat.untyped_storage())
                descriptor.slot, descriptor.generation = shared.slot, shared.generation
                descriptor.file_descriptor, descriptor.file_bytes = shared.file_descriptor, shared.file_bytes
            assert steps.start(descriptor, flat) == FINISHED
        while state := steps.wait(len(cases)):
            assert state == WAITING
        return flats

    with ThreadPoolExecutor(world) as pool:
        results = list(pool.map(run_rank, range(world)))
    for number, (size, dtype) in enumerate(cases):
        expected = reference([rank_tensor(r, size, dtype) for r in range(world)], mean=dtype != torch.int64)
        for rank in range(world):
            assert same_bits(results[rank][number], expected), f"{size} of {dtype} on rank {rank}"
    for steps, _ in ranks:
        steps.close()


@pytest.mark.soak
@pytest.mark.parametrize("world", [2, 3, 5])
def test_large_tensors_to_the_last_bit(world: int) -> None:
    assert run_ranks(_all_sizes_and_dtypes, world, "compiled", (1_333_333,)) == [[]] * world


def test_compilers_that_do_not_know_fp16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests every 16-bit number, once added to zero and once to another number."""
    monkeypatch.setattr(compiled_helper, "FLAGS", (*compiled_helper.FLAGS, "-U__FLT16_MANT_DIG__"))
    ranks = _steps("compiled", 2, tmp_path)
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    pairs = [(patterns, torch.zeros_like(patterns)), (patterns, patterns.roll(9973))]
    for sequence, pair in enumerate(pairs, 1):
        flats = [half.view(torch.float16).clone() for half in pair]
        expected = reference(flats)
        for (steps, storages), flat in zip(ranks, flats, strict=True):
            shared = storages.share(flat.untyped_storage())
            descriptor = Descriptor(shared.slot, shared.generation, shared.file_descriptor, shared.file_bytes)
            descriptor.count, descriptor.type, descriptor.mean = 65536, TYPES[torch.float16], 1
            assert steps.start(descriptor, flat) == FINISHED
        for steps, _ in [*ranks, *ranks]:
            assert steps.wait(sequence) in (FINISHED, WAITING)
        numbers = ~expected.isnan()
        for flat in flats:
            assert same_bits(flat[numbers], expected[numbers])
            assert bool(flat[~numbers].isnan().all())


def test_the_steps_in_python_have_the_same_results(three: RankPool) -> None:
    """Where the processor reorders writes, the fence of the helper is called between memory and counters."""
    assert three.run(_all_sizes_and_dtypes, "python", SIZES) == [[]] * 3


def _special_values(rank: int, world: int) -> list[bool]:
    """Checks overflow, infinities, subnormal numbers, ties of rounding, and every 16-bit pattern."""
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
        alone = every_number.clone() if rank == 0 else torch.zeros_like(every_number)
        reducer.start(alone, 1)
        reducer.finish()
        expected = reference([every_number, *[torch.zeros_like(every_number)] * (world - 1)])
        numbers = ~expected.isnan()
        checks.append(same_bits(alone[numbers], expected[numbers]))
    huge = torch.full((20_000,), 60_000.0, dtype=torch.float16)
    reducer.start(huge, 2)
    reducer.finish()
    checks.append(bool((huge == 60_000.0).all()))
    reducer.close()
    return checks


@pytest.mark.parametrize("world", [2, 3])
def test_every_16_bit_number(world: int) -> None:
    for checks in run_ranks(_special_values, world):
        assert all(checks), checks


def _many_steps(rank: int, world: int, implementation: Implementation | None, steps: int) -> list[str]:
    """Runs several buckets at the same time: reused and new tensors, views into a larger storage, small and large
    ones."""
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


def _more_than_the_ring(rank: int, world: int, implementation: Implementation | None) -> bool:
    reducer = SharedMemoryReducer(world_group(), implementation=implementation)
    flats = [torch.full((size,), float(rank + number)) for number, size in enumerate([10, 6000] * (RING + 5))]
    for number, flat in enumerate(flats):
        reducer.start(flat, number)
    reducer.finish()
    reducer.close()
    return all(bool((flat == number + (world - 1) / 2).all()) for number, flat in enumerate(flats))


@pytest.mark.parametrize("implementation", ["compiled", "python"])
def test_more_pending_buckets_than_the_ring_has(two: RankPool, implementation: Implementation) -> None:
    assert two.run(_more_than_the_ring, implementation) == [True, True]


def _count_mappings(rank: int, world: int, implementation: Implementation | None) -> tuple[bool, list[int], list[int]]:
    reducer = SharedMemoryReducer(world_group(), implementation=implementation)
    correct, mappings = True, []
    for step in range(2 * SLOTS + 10):
        flat = torch.full((STAGE_UP_TO_BYTES // 4 + 1 + step,), float(step + rank))
        reducer.start(flat, 0)
        reducer.finish()
        correct = correct and bool((flat == step + (world - 1) / 2).all())
        mappings.append(reducer._steps.mappings())
    alive = [torch.full((STAGE_UP_TO_BYTES // 4 + 1,), float(rank)) for _ in range(SLOTS + 20)]
    for flat in alive * 2:
        flat.fill_(float(rank))
        reducer.start(flat, 0)
        reducer.finish()
        correct = correct and bool((flat == (world - 1) / 2).all())
    final_counts = [reducer._steps.mappings(), len(reducer._storages)]
    reducer.close()
    return correct, [min(mappings[1:]), max(mappings)], final_counts


@pytest.mark.parametrize("implementation", ["compiled", "python"])
def test_peers_unmap_tensors_that_are_gone(two: RankPool, implementation: Implementation) -> None:
    for correct, (fewest, most), (mappings, storages) in two.run(_count_mappings, implementation):
        assert correct
        assert fewest >= 1
        assert most <= 3
        assert mappings <= storages <= SLOTS


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


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_slices_are_adjacent_and_whole_lines(world: int) -> None:
    for item in (2, 4, 8):
        for count in (0, 1, 31, 64, 65, 1000, 12_345):
            cuts = [slice_begin(count, item, rank, world) for rank in range(world + 1)]
            assert cuts[0] == 0
            assert cuts[-1] == count
            assert cuts == sorted(cuts)
            assert all(cut * item % 128 == 0 for cut in cuts if cut < count)


class _Hook:
    """A communication hook of DDP that starts each bucket on a reducer, and finishes all of them with the last one."""

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self.waiting: list[tuple[torch.futures.Future[Tensor], Tensor]] = []

    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self.waiting.append((future, bucket.buffer()))
        self.reducer.start(bucket.buffer(), bucket.index())
        if bucket.is_last():
            self.reducer.finish()
            for pending, tensor in self.waiting:
                pending.set_result(tensor)
            self.waiting.clear()
        return future


def _call(hook: _Hook, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return hook(bucket)


def _ddp(rank: int, world: int) -> list[str]:
    wrong = []
    group = world_group()
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
        reducer = SharedMemoryReducer(group)
        models[1].register_comm_hook(_Hook(reducer), _call)
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


def test_ddp_with_this_reducer_has_the_gradients_of_gloo(two: RankPool) -> None:
    """With two ranks both have the same bits, because dividing by two is exact."""
    assert two.run(_ddp) == [[], []]


def _refusals(rank: int, world: int) -> list[str]:
    messages = []
    reducer = SharedMemoryReducer(world_group())
    for flat in (torch.empty(3, device="meta"), torch.zeros(4, 4).t()[:, :2], torch.zeros(3, dtype=torch.int64)):
        try:
            reducer.start(flat, 4)
        except InputError as error:
            messages.append(str(error))
    reducer.close()
    try:
        reducer.start(torch.zeros(3), 5)
    except CollectiveError as error:
        messages.append(str(error))
    return messages


def test_unsupported_tensors_are_refused(two: RankPool) -> None:
    messages = two.run(_refusals)[0]
    assert "bucket 4: the tensor is on meta, and only CPU tensors" in messages[0]
    assert "must be contiguous" in messages[1]
    assert "int64 are not averaged" in messages[2]
    assert "closed" in messages[3]


def _different(rank: int, world: int) -> str:
    reducer = SharedMemoryReducer(world_group())
    try:
        reducer.start(torch.zeros(5000 + rank), 7)
        reducer.finish()
    except CollectiveError as error:
        return str(error)
    finally:
        reducer.close()
    return ""


def test_ranks_with_different_tensors_are_named(two: RankPool) -> None:
    assert two.run(_different) == [
        "shared-memory all-reduce of bucket 7: rank 1 brought 5001 elements of float32 for the all-reduce of bucket 7, "
        "rank 0 5000 elements of float32 for the all-reduce of bucket 7",
        "shared-memory all-reduce of bucket 7: rank 0 brought 5000 elements of float32 for the all-reduce of bucket 7, "
        "rank 1 5001 elements of float32 for the all-reduce of bucket 7",
    ]


def _one_stays_away(rank: int, world: int, implementation: Implementation, closes: bool) -> str:
    """Rank 1 does not start the second bucket, and finishes none."""
    reducer = SharedMemoryReducer(world_group(), implementation=implementation, timeout_s=60 if closes else 0.3)
    message = ""
    flats = [torch.zeros(30_000), torch.zeros(20_000)]
    reducer.start(flats[0], 0)
    if rank != 1:
        reducer.start(flats[1], 1)
    try:
        if rank != 1:
            reducer.finish()
    except CollectiveError as error:
        message = str(error)
        with pytest.raises(CollectiveError):
            reducer.start(flats[0], 2)
    if rank == 1 and not closes:  # it waits until the others have failed
        dist.barrier()
    reducer.close()
    if rank != 1 and not closes:
        dist.barrier()
    return message


@pytest.mark.parametrize("implementation", ["compiled", "python"])
@pytest.mark.parametrize("closes", [False, True])
def test_a_missing_rank_is_named(three: RankPool, implementation: Implementation, closes: bool) -> None:
    messages = three.run(_one_stays_away, implementation, closes)
    reason = ("has left" if closes else r"did not come within 0\.3 s") + "|is missing, as rank [02] says"
    for rank in (0, 2):
        assert re.fullmatch(rf"shared-memory all-reduce of bucket [01]: rank 1 ({reason})", messages[rank])


def _one_dies(rank: int, world: int, implementation: Implementation, folder: str) -> None:
    """Rank 1 is killed in the middle of a step, and then the other rank."""
    reducer = SharedMemoryReducer(world_group(), implementation=implementation, timeout_s=100)
    flats = [torch.zeros(100_000) for _ in range(4)]
    for flat in flats[:3]:
        reducer.start(flat, 0)
    reducer.finish()
    for bucket in range(3):
        reducer.start(flats[bucket], bucket)
    (Path(folder) / f"maps{rank}").write_text(Path("/proc/self/maps").read_text())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    reducer.start(flats[3], 3)
    try:
        reducer.finish()
    except CollectiveError as error:
        (Path(folder) / f"rank{rank}").write_text(str(error))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("implementation", all_but(["compiled"], ["compiled", "python"]))
def test_a_killed_rank_is_named_and_leaves_no_shared_memory(implementation: Implementation, tmp_path: Path) -> None:
    """It is named long before the timeout of the reducer, which is longer than that of the pool."""
    pool = RankPool(2, timeout_s=60)
    try:
        with pytest.raises(RankFailure, match="exit code -9"):
            pool.run(_one_dies, implementation, str(tmp_path))
    finally:
        pool.close()
    message = (tmp_path / "rank0").read_text()
    assert re.fullmatch(r"shared-memory all-reduce of bucket \d: rank 1 has died", message)
    for rank in range(2):  # memory without a name, which is freed with the last process that maps it
        files = re.findall(r" (/memfd:.*|/dev/shm/.*)", (tmp_path / f"maps{rank}").read_text())
        assert files
        assert all(name.endswith(" (deleted)") for name in files)


def _in_a_group(rank: int, world: int) -> bool:
    group = dist.new_group([1, 2])
    if rank == 0:
        return True
    reducer = SharedMemoryReducer(group)
    flat = rank_tensor(rank, 9001, torch.float32)
    reducer.start(flat, 0)
    reducer.finish()
    if rank == 1:
        message = ""
        try:
            reducer.start(torch.zeros(2), 1)
            reducer.finish()
        except CollectiveError as error:
            message = str(error)
        correct = message == "shared-memory all-reduce of bucket 1: rank 2 has left"
    else:
        correct = True
    reducer.close()
    return correct and same_bits(flat, reference([rank_tensor(r, 9001, torch.float32) for r in (1, 2)]))


def test_errors_in_a_smaller_group_name_ranks_of_the_world(three: RankPool) -> None:
    assert three.run(_in_a_group) == [True] * 3
