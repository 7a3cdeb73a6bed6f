"""All-reduce in shared memory: the sum in the order of the ranks to the last bit, whatever the size, type and world."""

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
from meshwright.collectives.shared_memory import fences, segment
from meshwright.collectives.shared_memory.plain_memory import Plain
from meshwright.collectives.shared_memory.reducer import SharedMemory, Way
from meshwright.collectives.shared_memory.segment import RING, SLOTS, Descriptor
from meshwright.collectives.shared_memory.steps import (
    FINISHED,
    STAGE_UP_TO_BYTES,
    TYPES,
    WAITING,
    Compiled,
    Steps,
    slice_begin,
)
from meshwright.collectives.shared_memory.storages import Storages
from meshwright.errors import CollectiveError, InputError
from tests.ranks import RankFailure, RankPool, run_ranks
from tests.soaked import all_but

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIZES = (0, 1, 7, 63, 64, 65, 1000, 4097, 16385, 100_003)


def brought(rank: int, size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """What a rank brings: every rank can make every other's."""
    made = torch.Generator().manual_seed(1000 * seed + 17 * size + rank)
    if dtype == torch.int64:
        return torch.randint(-(2**40), 2**40, (size,), generator=made)
    return (torch.randn(size, generator=made, dtype=torch.float64) * 10).to(dtype)


def reference(tensors: list[Tensor], *, mean: bool = True) -> Tensor:
    """The definition, in one process."""
    wide = torch.float32 if tensors[0].dtype in (torch.bfloat16, torch.float16) else tensors[0].dtype
    total = tensors[0].to(wide, copy=True)
    for tensor in tensors[1:]:
        total += tensor.to(wide)
    return (total / len(tensors) if mean else total).to(tensors[0].dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _matrix(rank: int, world: int, way: Way | None, sizes: tuple[int, ...]) -> list[str]:
    wrong = []
    reducer = SharedMemory(world_group(), way=way)
    cases = [(size, dtype) for size in sizes for dtype in FLOATS]
    for seed in range(2):
        for number, (size, dtype) in enumerate(cases):
            flat = brought(rank, size, dtype, seed)
            reducer.start(flat, number)
            reducer.finish()
            if not same_bits(flat, reference([brought(r, size, dtype, seed) for r in range(world)])):
                wrong.append(f"{size} of {dtype}, seed {seed}")
    reducer.close()
    total = SharedMemory(world_group(), way=way, operation="sum")
    for dtype in (torch.int64, torch.float32):
        for size in sizes:
            flat = brought(rank, size, dtype)
            total.start(flat, 0)
            total.finish()
            if not same_bits(flat, reference([brought(r, size, dtype) for r in range(world)], mean=False)):
                wrong.append(f"sum of {size} of {dtype}")
    total.close()
    return wrong


@pytest.mark.parametrize("world", all_but([3], [1, 2, 3, 4, 5, 6, 7, 8]))
def test_mean_and_sum_to_the_last_bit(world: int) -> None:
    """Also with more ranks than cores."""
    assert run_ranks(_matrix, world, "compiled", SIZES) == [[]] * world


def _steps(way: Way, world: int, folder: Path | None = None) -> list[tuple[Steps, Storages]]:
    """The steps of ranks that are threads of this process: worlds of any size without starting any."""
    helper = fences.helper(folder)
    assert isinstance(helper, ctypes.CDLL)
    segments = [segment.create()[1] for _ in range(world)]
    pids = [os.getpid()] * world
    made: list[tuple[Steps, Storages]] = []
    for rank in range(world):
        steps = Compiled(helper, rank, segments, pids) if way == "compiled" else None
        made.append((steps or Plain(rank, segments, pids, helper.fence), Storages(segments[rank])))
    return made


@pytest.mark.parametrize("way", ["compiled", "plain"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
def test_the_steps_of_many_ranks(way: Way, world: int) -> None:
    ranks, cases = _steps(way, world), [(size, dtype) for size in SIZES for dtype in (*FLOATS, torch.int64)]

    def rank_of(rank: int) -> list[Tensor]:
        steps, storages = ranks[rank]
        flats = []
        for sequence, (size, dtype) in enumerate(cases, 1):
            flat = brought(rank, size, dtype)
            flats.append(flat)
            described = Descriptor(count=size, type=TYPES[dtype], mean=dtype != torch.int64, bucket=sequence)
            described.staged = size * flat.element_size() <= steps.stage_up_to_bytes or size == 0
            if not described.staged:
                known = storages.place(flat.untyped_storage())
                described.slot, described.generation = known.slot, known.generation
                described.file_descriptor, described.file_bytes = known.file_descriptor, known.file_bytes
            assert steps.start(described, flat) == FINISHED
        while answer := steps.wait(len(cases)):
            assert answer == WAITING
        return flats

    with ThreadPoolExecutor(world) as pool:
        found = list(pool.map(rank_of, range(world)))
    for number, (size, dtype) in enumerate(cases):
        expected = reference([brought(r, size, dtype) for r in range(world)], mean=dtype != torch.int64)
        for rank in range(world):
            assert same_bits(found[rank][number], expected), f"{size} of {dtype} on rank {rank}"
    for steps, _ in ranks:
        steps.close()


@pytest.mark.soak
@pytest.mark.parametrize("world", [2, 3, 5])
def test_large_tensors_to_the_last_bit(world: int) -> None:
    assert run_ranks(_matrix, world, "compiled", (1_333_333,)) == [[]] * world


def test_compilers_that_do_not_know_fp16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number of 16 bits, once as it is and once with a part of another one."""
    monkeypatch.setattr(fences, "FLAGS", (*fences.FLAGS, "-U__FLT16_MANT_DIG__"))
    ranks = _steps("compiled", 2, tmp_path)
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    pairs = [(patterns, torch.zeros_like(patterns)), (patterns, patterns.roll(9973))]
    for sequence, pair in enumerate(pairs, 1):
        flats = [half.view(torch.float16).clone() for half in pair]
        expected = reference(flats)
        for (steps, storages), flat in zip(ranks, flats, strict=True):
            known = storages.place(flat.untyped_storage())
            described = Descriptor(known.slot, known.generation, known.file_descriptor, known.file_bytes)
            described.count, described.type, described.mean = 65536, TYPES[torch.float16], 1
            assert steps.start(described, flat) == FINISHED
        for steps, _ in [*ranks, *ranks]:
            assert steps.wait(sequence) in (FINISHED, WAITING)
        numbers = ~expected.isnan()
        for flat in flats:
            assert same_bits(flat[numbers], expected[numbers])
            assert bool(flat[~numbers].isnan().all())


def test_plain_python_takes_the_same_steps(three: RankPool) -> None:
    """Also where the processor reorders writes: there the helper's fence is called between memory and counters."""
    assert three.run(_matrix, "plain", SIZES) == [[]] * 3


def _special_values(rank: int, world: int) -> list[bool]:
    """Overflow, infinities, subnormal numbers, ties of rounding, and every 16-bit pattern."""
    found = []
    reducer = SharedMemory(world_group())
    for dtype in (torch.float16, torch.bfloat16):
        patterns = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
        every = patterns.view(dtype)
        shift = [patterns.roll(9973 * r).view(dtype) for r in range(world)]
        flat = shift[rank].clone()
        reducer.start(flat, 0)
        reducer.finish()
        expected = reference(shift)
        numbers = ~expected.isnan()
        found += [same_bits(flat[numbers], expected[numbers]), bool(flat[~numbers].isnan().all())]
        alone = every.clone() if rank == 0 else torch.zeros_like(every)
        reducer.start(alone, 1)
        reducer.finish()
        expected = reference([every, *[torch.zeros_like(every)] * (world - 1)])
        numbers = ~expected.isnan()
        found.append(same_bits(alone[numbers], expected[numbers]))
    huge = torch.full((20_000,), 60_000.0, dtype=torch.float16)
    reducer.start(huge, 2)
    reducer.finish()
    found.append(bool((huge == 60_000.0).all()))
    reducer.close()
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_every_16_bit_number(world: int) -> None:
    for found in run_ranks(_special_values, world):
        assert all(found), found


def _many_steps(rank: int, world: int, way: Way | None, steps: int) -> list[str]:
    """Several buckets in flight: kept ones, new ones, views into a larger storage, small ones between large ones."""
    wrong = []
    reducer = SharedMemory(world_group(), way=way)
    storage = torch.zeros(40_000)
    kept = [torch.zeros(20_011), storage[3:10_007], torch.zeros(50), storage[20_000:40_000], torch.zeros(9000)]
    for step in range(steps):
        made = [torch.empty(5000 + 1000 * (step % 3)) for _ in range(step % 4)]
        flats = [*kept, *made]
        flats = flats[step % len(flats) :] + flats[: step % len(flats)]
        for bucket, flat in enumerate(flats):
            flat.copy_(brought(rank, flat.numel(), flat.dtype, step + bucket))
            reducer.start(flat, bucket)
        reducer.finish()
        for bucket, flat in enumerate(flats):
            expected = reference([brought(r, flat.numel(), flat.dtype, step + bucket) for r in range(world)])
            if not same_bits(flat, expected):
                wrong.append(f"step {step}, bucket {bucket}")
        if storage[10_007:20_000].any() or storage[:3].any():
            wrong.append(f"step {step}: what lies beside a view was written")
    reducer.close()
    return wrong


@pytest.mark.parametrize("way", ["compiled", "plain"])
def test_many_buckets_in_flight_over_many_steps(three: RankPool, way: Way) -> None:
    assert three.run(_many_steps, way, 12) == [[]] * 3


@pytest.mark.soak
@pytest.mark.parametrize("world", [2, 4, 8])
def test_many_buckets_in_flight_over_very_many_steps(world: int) -> None:
    assert run_ranks(_many_steps, world, "compiled", 100) == [[]] * world


def _more_than_the_ring(rank: int, world: int, way: Way | None) -> bool:
    reducer = SharedMemory(world_group(), way=way)
    flats = [torch.full((size,), float(rank + number)) for number, size in enumerate([10, 6000] * (RING + 5))]
    for number, flat in enumerate(flats):
        reducer.start(flat, number)
    reducer.finish()
    reducer.close()
    return all(bool((flat == number + (world - 1) / 2).all()) for number, flat in enumerate(flats))


@pytest.mark.parametrize("way", ["compiled", "plain"])
def test_more_buckets_than_places(two: RankPool, way: Way) -> None:
    assert two.run(_more_than_the_ring, way) == [True, True]


def _memory_is_given_back(rank: int, world: int, way: Way | None) -> tuple[bool, list[int], list[int]]:
    reducer = SharedMemory(world_group(), way=way)
    right, opened = True, []
    for step in range(2 * SLOTS + 10):
        flat = torch.full((STAGE_UP_TO_BYTES // 4 + 1 + step,), float(step + rank))
        reducer.start(flat, 0)
        reducer.finish()
        right = right and bool((flat == step + (world - 1) / 2).all())
        opened.append(reducer._steps.mappings())
    alive = [torch.full((STAGE_UP_TO_BYTES // 4 + 1,), float(rank)) for _ in range(SLOTS + 20)]
    for flat in alive * 2:
        flat.fill_(float(rank))
        reducer.start(flat, 0)
        reducer.finish()
        right = right and bool((flat == (world - 1) / 2).all())
    last = [reducer._steps.mappings(), len(reducer._storages)]
    reducer.close()
    return right, [min(opened[1:]), max(opened)], last


@pytest.mark.parametrize("way", ["compiled", "plain"])
def test_peers_let_go_of_tensors_that_are_gone(two: RankPool, way: Way) -> None:
    for right, (fewest, most), (mappings, known) in two.run(_memory_is_given_back, way):
        assert right
        assert fewest >= 1
        assert most <= 3
        assert mappings <= known <= SLOTS


def _scatter_and_gather(rank: int, world: int, way: Way | None) -> list[str]:
    wrong = []
    reducer = SharedMemory(world_group(), way=way)
    for size in (0, 1, 7, 1000, 20_003):
        for dtype in (torch.float32, torch.bfloat16):
            all_of = [brought(r, size, dtype) for r in range(world)]
            flat = brought(rank, size, dtype)
            mine = reducer.reduce_scatter(flat, 0)
            begin, end = reducer.bounds(flat)
            expected = all_of[rank].clone()
            expected[begin:end] = reference(all_of, mean=False)[begin:end]
            if not same_bits(flat, expected) or mine.numel() != end - begin:
                wrong.append(f"reduce-scatter of {size} {dtype}")
            mine.mul_(2)  # as if another machine had added as much
            reducer.all_gather(flat, 0)
            if not same_bits(flat, reference(all_of, mean=False) * 2):
                wrong.append(f"all-gather of {size} {dtype}")
    reducer.close()
    return wrong


@pytest.mark.parametrize("way", ["compiled", "plain"])
def test_halves_for_two_levels(three: RankPool, way: Way) -> None:
    assert three.run(_scatter_and_gather, way) == [[]] * 3


@pytest.mark.parametrize("ranks_", [1, 2, 3, 5, 8])
def test_slices_follow_each_other(ranks_: int) -> None:
    for item in (2, 4, 8):
        for count in (0, 1, 31, 64, 65, 1000, 12_345):
            cuts = [slice_begin(count, item, rank, ranks_) for rank in range(ranks_ + 1)]
            assert cuts[0] == 0
            assert cuts[-1] == count
            assert cuts == sorted(cuts)
            assert all(cut * item % 128 == 0 for cut in cuts if cut < count)


class _Hook:
    """Stock DDP with any reducer: what is started in a bucket's hook is finished in that of the last."""

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self.waiting: list[tuple[torch.futures.Future[Tensor], Tensor]] = []

    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self.waiting.append((future, bucket.buffer()))
        self.reducer.start(bucket.buffer(), bucket.index())
        if bucket.is_last():
            self.reducer.finish()
            for done, tensor in self.waiting:
                done.set_result(tensor)
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
        reducer = SharedMemory(group)
        models[1].register_comm_hook(_Hook(reducer), _call)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
        for step in range(5):
            inputs = brought(rank, 8 * 40, torch.float32, step).view(8, 40)
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


def test_stock_ddp_has_the_gradients_of_gloo(two: RankPool) -> None:
    """Of two ranks' gradients both have the same bits: halves are exact."""
    assert two.run(_ddp) == [[], []]


def _told(rank: int, world: int) -> list[str]:
    said = []
    reducer = SharedMemory(world_group())
    for flat in (torch.empty(3, device="meta"), torch.zeros(4, 4).t()[:, :2], torch.zeros(3, dtype=torch.int64)):
        try:
            reducer.start(flat, 4)
        except InputError as error:
            said.append(str(error))
    reducer.close()
    try:
        reducer.start(torch.zeros(3), 5)
    except CollectiveError as error:
        said.append(str(error))
    return said


def test_what_it_cannot_do_is_refused(two: RankPool) -> None:
    said = two.run(_told)[0]
    assert "bucket 4: the tensor is on meta, and only CPU tensors" in said[0]
    assert "must be contiguous" in said[1]
    assert "int64 are not averaged" in said[2]
    assert "closed" in said[3]


def _different(rank: int, world: int) -> str:
    reducer = SharedMemory(world_group())
    try:
        reducer.start(torch.zeros(5000 + rank), 7)
        reducer.finish()
    except CollectiveError as error:
        return str(error)
    finally:
        reducer.close()
    return ""


def test_ranks_that_bring_different_tensors_are_told(two: RankPool) -> None:
    assert two.run(_different) == [
        "shared-memory all-reduce of bucket 7: rank 1 brought 5001 elements of float32 for the all-reduce of bucket 7, "
        "rank 0 5000 elements of float32 for the all-reduce of bucket 7",
        "shared-memory all-reduce of bucket 7: rank 0 brought 5000 elements of float32 for the all-reduce of bucket 7, "
        "rank 1 5001 elements of float32 for the all-reduce of bucket 7",
    ]


def _one_stays_away(rank: int, world: int, way: Way, closes: bool) -> str:
    """Rank 1 does not come to the second bucket, and finishes none."""
    reducer = SharedMemory(world_group(), way=way, timeout_s=60 if closes else 0.3)
    said = ""
    flats = [torch.zeros(30_000), torch.zeros(20_000)]
    reducer.start(flats[0], 0)
    if rank != 1:
        reducer.start(flats[1], 1)
    try:
        if rank != 1:
            reducer.finish()
    except CollectiveError as error:
        said = str(error)
        with pytest.raises(CollectiveError):
            reducer.start(flats[0], 2)
    if rank == 1 and not closes:  # it hangs until the others have given up
        dist.barrier()
    reducer.close()
    if rank != 1 and not closes:
        dist.barrier()
    return said


@pytest.mark.parametrize("way", ["compiled", "plain"])
@pytest.mark.parametrize("closes", [False, True])
def test_a_rank_that_stays_away_is_named(three: RankPool, way: Way, closes: bool) -> None:
    said = three.run(_one_stays_away, way, closes)
    words = ("has left" if closes else r"did not come within 0\.3 s") + "|is missing, as rank [02] says"
    for rank in (0, 2):
        assert re.fullmatch(rf"shared-memory all-reduce of bucket [01]: rank 1 ({words})", said[rank])


def _one_dies(rank: int, world: int, way: Way, folder: str) -> None:
    """Then the other too, in the middle of a step."""
    reducer = SharedMemory(world_group(), way=way, timeout_s=100)
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


@pytest.mark.parametrize("way", all_but(["compiled"], ["compiled", "plain"]))
def test_a_rank_that_is_killed_is_named_and_nothing_stays(way: Way, tmp_path: Path) -> None:
    """Long before the timeout, which is longer than the pool's."""
    pool = RankPool(2, timeout_s=60)
    try:
        with pytest.raises(RankFailure, match="exit code -9"):
            pool.run(_one_dies, way, str(tmp_path))
    finally:
        pool.close()
    said = (tmp_path / "rank0").read_text()
    assert re.fullmatch(r"shared-memory all-reduce of bucket \d: rank 1 has died", said)
    for rank in range(2):  # memory without a name, which goes with the last process that has it
        shared = re.findall(r" (/memfd:.*|/dev/shm/.*)", (tmp_path / f"maps{rank}").read_text())
        assert shared
        assert all(name.endswith(" (deleted)") for name in shared)


def _in_a_group(rank: int, world: int) -> bool:
    group = dist.new_group([1, 2])
    if rank == 0:
        return True
    reducer = SharedMemory(group)
    flat = brought(rank, 9001, torch.float32)
    reducer.start(flat, 0)
    reducer.finish()
    if rank == 1:
        said = ""
        try:
            reducer.start(torch.zeros(2), 1)
            reducer.finish()
        except CollectiveError as error:
            said = str(error)
        right = said == "shared-memory all-reduce of bucket 1: rank 2 has left"
    else:
        right = True
    reducer.close()
    return right and same_bits(flat, reference([brought(r, 9001, torch.float32) for r in (1, 2)]))


def test_a_group_within_the_world_whose_ranks_are_called_as_in_the_world(three: RankPool) -> None:
    assert three.run(_in_a_group) == [True] * 3
