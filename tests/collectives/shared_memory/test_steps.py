"""The steps of an all-reduce give the sum of all ranks to the last bit, whether they are compiled or written in Python.
The ranks here are threads of one process."""

import ctypes
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.collectives.shared_memory import compiled_helper, reducer, segment
from meshwright.collectives.shared_memory.python_steps import PythonSteps
from meshwright.collectives.shared_memory.reducer import Implementation
from meshwright.collectives.shared_memory.segment import Descriptor
from meshwright.collectives.shared_memory.steps import (
    FINISHED,
    TYPES,
    WAITING,
    CollectiveSteps,
    CompiledSteps,
    slice_begin,
)
from meshwright.collectives.shared_memory.storages import SharedStorages
from meshwright.files import compiled
from tests.collectives.shared_memory.rank_sums import FLOATS, SIZES, rank_tensor, reference, same_bits


def _make_steps(
    implementation: Implementation, world: int, folder: Path | None = None
) -> list[tuple[CollectiveSteps, SharedStorages]]:
    """Returns the steps and the shared storages of every rank. The ranks are threads of this process."""
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
def test_compiled_and_python_steps_give_the_mean_and_the_sum(implementation: Implementation, world: int) -> None:
    ranks, cases = (
        _make_steps(implementation, world),
        [(size, dtype) for size in SIZES for dtype in (*FLOATS, torch.int64)],
    )

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


def test_a_compiler_without_fp16_gives_the_same_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every 16-bit number is added to zero, and to another number."""
    monkeypatch.setattr(compiled, "FLAGS", (*compiled.FLAGS, "-U__FLT16_MANT_DIG__"))
    ranks = _make_steps("compiled", 2, tmp_path)
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


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_slices_are_adjacent_and_begin_at_cache_lines(world: int) -> None:
    for item in (2, 4, 8):
        for count in (0, 1, 31, 64, 65, 1000, 12_345):
            cuts = [slice_begin(count, item, rank, world) for rank in range(world + 1)]
            assert cuts[0] == 0
            assert cuts[-1] == count
            assert cuts == sorted(cuts)
            assert all(cut * item % 128 == 0 for cut in cuts if cut < count)


def test_waiting_for_a_rank_gives_up_after_a_tenth_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the caller looks whether the rank still lives. Here time passes only in `sleep`."""
    (steps, _), _ = _make_steps("python", 2)
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "monotonic", lambda: 100 + sum(slept))
    steps.start(Descriptor(count=3, type=TYPES[torch.float32], bucket=0), torch.zeros(3))
    assert steps.wait(1) == WAITING
    assert 0.1 <= sum(slept) < 0.2
    assert steps.why()[:2] == (1, 1)


@pytest.mark.parametrize("keeps_order", [True, False])
def test_steps_in_python_have_a_fence_where_the_processor_reorders_writes(
    keeps_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_helper, "has_total_store_order", lambda: keeps_order)
    helper = compiled_helper.load_helper(None)
    assert isinstance(helper, ctypes.CDLL)
    steps = reducer._make_steps("python", helper, 0, [segment.create_segment()[1]], [os.getpid()])
    assert isinstance(steps, PythonSteps)
    assert (steps._fence is helper.fence) is not keeps_order
