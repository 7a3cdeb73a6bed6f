"""The reducer that calls the backend's all-reduce averages buckets, and its errors name the bucket."""

from datetime import timedelta

import torch
import torch.distributed as dist

from meshwright.collectives.native import NativeReducer
from meshwright.errors import CollectiveError
from meshwright.processes.torch_private import set_default_timeout
from tests.collectives.world_group import world_group
from tests.ranks import RankPool


def _average_three_buckets(rank: int, world: int) -> list[list[float]]:
    reducer = NativeReducer(world_group())
    flats = [torch.arange(5.0) * (rank + 1), torch.full((3,), float(rank)), torch.zeros(0)]
    for bucket, flat in enumerate(flats):
        reducer.start(flat, bucket)
    reducer.finish()
    reducer.finish()
    reducer.close()
    return [flat.tolist() for flat in flats]


def test_buckets_become_the_mean_over_ranks(two: RankPool) -> None:
    assert two.run(_average_three_buckets) == [[[0.0, 1.5, 3.0, 4.5, 6.0], [0.5, 0.5, 0.5], []]] * 2


def _reduce_without_rank_1(rank: int, world: int) -> str:
    group = dist.new_group()
    reducer = NativeReducer(group)
    reducer.start(torch.ones(10), 0)
    reducer.finish()  # connects the ranks, which may take longer than the timeout
    set_default_timeout(group._get_backend(torch.device("cpu")), timedelta(seconds=0.3))
    message = ""
    if rank == 0:
        try:
            reducer.start(torch.ones(100_000), 1)
            reducer.finish()
        except CollectiveError as error:
            message = str(error)
    dist.barrier()
    reducer.close()
    return message


def test_a_failure_names_the_bucket_and_the_group(two: RankPool) -> None:
    message = two.run(_reduce_without_rank_1)[0]
    assert message.startswith("gloo all-reduce of bucket 1 among ranks 0, 1: ")
    assert len(message.splitlines()) == 1
