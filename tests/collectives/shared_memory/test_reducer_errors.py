"""Errors of the all-reduce in shared memory name the bucket and the rank that caused them."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.collectives.shared_memory.reducer import Implementation, SharedMemoryReducer
from meshwright.errors import CollectiveError, InputError
from tests.collectives.shared_memory.rank_sums import rank_tensor, reference, same_bits
from tests.collectives.world_group import world_group
from tests.ranks import RankFailure, RankPool
from tests.soaked import all_but


def _refusal_messages(rank: int, world: int) -> list[str]:
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
    messages = two.run(_refusal_messages)[0]
    assert "bucket 4: the tensor is on meta, and only CPU tensors" in messages[0]
    assert "must be contiguous" in messages[1]
    assert "int64 are not averaged" in messages[2]
    assert "closed" in messages[3]


def _reduce_different_sizes(rank: int, world: int) -> str:
    reducer = SharedMemoryReducer(world_group())
    try:
        reducer.start(torch.zeros(5000 + rank), 7)
        reducer.finish()
    except CollectiveError as error:
        return str(error)
    finally:
        reducer.close()
    return ""


def test_ranks_with_tensors_of_different_sizes_are_named(two: RankPool) -> None:
    assert two.run(_reduce_different_sizes) == [
        "shared-memory all-reduce of bucket 7: rank 1 brought 5001 elements of float32 for the all-reduce of bucket 7, "
        "rank 0 5000 elements of float32 for the all-reduce of bucket 7",
        "shared-memory all-reduce of bucket 7: rank 0 brought 5000 elements of float32 for the all-reduce of bucket 7, "
        "rank 1 5001 elements of float32 for the all-reduce of bucket 7",
    ]


def _reduce_without_rank_1(rank: int, world: int, implementation: Implementation, closes: bool) -> str:
    """Returns the error of this rank. Rank 1 does not start the second bucket, and finishes none. It then closes its
    reducer, or waits until the time limit of the others is over."""
    reducer = SharedMemoryReducer(world_group(), implementation=implementation, timeout_s=60 if closes else 0.3)
    message = ""
    flats = [torch.zeros(30_000), torch.zeros(20_000)]
    dist.barrier()  # no rank is late because it loads the compiled helper
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
    if rank == 1 and not closes:  # wait until the other ranks have failed
        dist.barrier()
    reducer.close()
    if rank != 1 and not closes:
        dist.barrier()
    return message


@pytest.mark.parametrize("implementation", ["compiled", "python"])
@pytest.mark.parametrize("closes", [False, True])
def test_a_missing_rank_is_named(three: RankPool, implementation: Implementation, closes: bool) -> None:
    messages = three.run(_reduce_without_rank_1, implementation, closes)
    reason = ("has left" if closes else r"did not come within 0\.3 s") + "|is missing, as rank [02] says"
    for rank in (0, 2):
        assert re.fullmatch(rf"shared-memory all-reduce of bucket [01]: rank 1 ({reason})", messages[rank])


def _reduce_and_kill_rank_1(rank: int, world: int, implementation: Implementation, folder: str) -> None:
    """Kills rank 1 in the middle of a step. Rank 0 writes the error that it gets into a file and kills itself, too."""
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
def test_a_killed_rank_is_named_and_leaves_no_shared_memory(
    implementation: Implementation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes long before the timeout of the reducer, which is longer than that of the pool."""
    # When the pool sees that rank 1 has died, it waits until rank 0 has ended, too, before it kills what is left.
    monkeypatch.setattr("tests.ranks._SETTLE_S", 60.0)
    pool = RankPool(2, timeout_s=60)
    try:
        with pytest.raises(RankFailure, match="exit code -9"):
            pool.run(_reduce_and_kill_rank_1, implementation, str(tmp_path))
    finally:
        pool.close()
    error = tmp_path / "rank0"
    assert error.exists(), "rank 0 wrote no error within 60 s after rank 1 was killed"
    assert re.fullmatch(r"shared-memory all-reduce of bucket \d: rank 1 has died", error.read_text())
    for rank in range(2):  # memory without a name, which is freed with the last process that maps it
        files = re.findall(r" (/memfd:.*|/dev/shm/.*)", (tmp_path / f"maps{rank}").read_text())
        assert files
        assert all(name.endswith(" (deleted)") for name in files)


def _reduce_in_smaller_group(rank: int, world: int) -> bool:
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
    assert three.run(_reduce_in_smaller_group) == [True] * 3
