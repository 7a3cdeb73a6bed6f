"""The all-reduce of the backend behind the interface of reducers."""

from datetime import timedelta

import torch
import torch.distributed as dist

from meshwright.collectives.native import NativeReducer
from meshwright.errors import CollectiveError
from tests.ranks import RankPool


def _mean(rank: int, world: int) -> list[list[float]]:
    group = dist.group.WORLD
    assert group is not None
    reducer = NativeReducer(group)
    flats = [torch.arange(5.0) * (rank + 1), torch.full((3,), float(rank)), torch.zeros(0)]
    for bucket, flat in enumerate(flats):
        reducer.start(flat, bucket)
    reducer.finish()
    reducer.finish()
    reducer.close()
    return [flat.tolist() for flat in flats]


def test_mean_over_ranks(two: RankPool) -> None:
    assert two.run(_mean) == [[[0.0, 1.5, 3.0, 4.5, 6.0], [0.5, 0.5, 0.5], []]] * 2


def _one_stays_away(rank: int, world: int) -> str:
    group = dist.new_group(timeout=timedelta(seconds=0.3))
    reducer = NativeReducer(group)
    reducer.start(torch.ones(10), 0)
    reducer.finish()
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
    message = two.run(_one_stays_away)[0]
    assert message.startswith("gloo all-reduce of bucket 1 among ranks 0, 1: ")
    assert len(message.splitlines()) == 1
