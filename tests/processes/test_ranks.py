"""The helper that runs functions in several ranks for tests."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.processes.processes import is_alive
from tests.ranks import RankFailure, ranks


def total(rank: int, world_size: int, start: float) -> torch.Tensor:
    value = torch.tensor([start + rank])
    dist.all_reduce(value)
    return value


def facts(rank: int, world_size: int) -> tuple[int, int, int]:
    return rank, os.getpid(), torch.get_num_threads()


def fail_on_1(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 does not want to")
    dist.barrier()


def die_on_1(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on_1(rank: int, world_size: int) -> None:
    while rank == 1:
        time.sleep(0.1)


def test_a_pool_runs_many_functions_and_recovers_from_failures() -> None:
    with ranks(2) as pool:
        assert [value.item() for value in pool.run(total, 1.0)] == [3.0, 3.0]
        numbers, pids, threads = zip(*pool.run(facts), strict=True)
        assert numbers == (0, 1)
        assert threads == (1, 1)
        with pytest.raises(RankFailure, match=r"rank 1 of 2 failed:(.|\n)*ValueError: rank 1 does not want to"):
            pool.run(fail_on_1)
        assert not any(map(is_alive, pids))
        assert [value.item() for value in pool.run(total, 2.0)] == [5.0, 5.0]
        with pytest.raises(RankFailure, match="rank 1 of 2 failed:\nit died with exit code -9"):
            pool.run(die_on_1)


@pytest.mark.soak
def test_the_time_limit_ends_a_rank_that_hangs() -> None:
    with ranks(2) as pool:
        pool.run(facts)  # starting the ranks takes longer than the time limit below
        pool.timeout_s = 3
        with pytest.raises(TimeoutError, match=r"ranks \[1\] gave no answer"):
            pool.run(hang_on_1)
