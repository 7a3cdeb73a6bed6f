"""The reducer that runs a schedule averages buckets, also under DDP, and names a missing rank."""

import os
import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.collectives.reducer import Reducer
from meshwright.collectives.scheduled import MissingRankFinder, ScheduledReducer
from meshwright.collectives.schedules.builders import build
from meshwright.errors import CollectiveError
from tests import ranks as ranks_file
from tests.collectives.ddp_hook import average_with
from tests.collectives.world_group import world_group
from tests.ranks import RankPool


def errors_of_averages(rank: int, world: int, name: str) -> list[float]:
    """Returns the largest relative error of each bucket of three steps."""
    errors = []
    reducer: Reducer = ScheduledReducer(world_group(), build(name, world, [world]))
    reducer.finish()  # nothing was started
    for step in range(3):
        buckets = [torch.full((size,), float(rank + step + size)) for size in (1000, 0, 33, 20_001)]
        for number, flat in enumerate(buckets):
            reducer.start(flat, number)
        reducer.finish()
        for flat in buckets:
            mean = sum(r + step + flat.numel() for r in range(world)) / world
            errors.append(float((flat - mean).abs().max()) / mean if flat.numel() else 0.0)
    reducer.close()
    return errors


@pytest.mark.parametrize("name", ["ring", "tree"])
def test_buckets_of_several_steps_are_averaged(four: RankPool, name: str) -> None:
    for errors in four.run(errors_of_averages, name):
        assert len(errors) == 12
        assert max(errors) <= 1e-6


def average_with_two_reducers(rank: int, world: int) -> tuple[float, float]:
    """Runs two reducers on one group at the same time. The ranks start their buckets in different order."""
    first, second = (ScheduledReducer(world_group(), build("ring", world, [world])) for _ in range(2))
    a, b = torch.full((5000,), float(rank)), torch.full((5000,), 10.0 * rank)
    starts = [(first, a, 0), (second, b, 1)]
    for reducer, flat, bucket in starts if rank == 0 else reversed(starts):
        reducer.start(flat, bucket)
    first.finish()
    second.finish()
    first.close()
    second.close()
    return a.unique().item(), b.unique().item()


def test_buckets_of_several_reducers_do_not_mix(four: RankPool) -> None:
    assert four.run(average_with_two_reducers) == [(1.5, 15.0)] * 4


def ddp_gradients(rank: int, world: int, with_reducer: bool) -> list[Tensor]:
    """Returns the gradients of two ranks, whose sums do not depend on the order."""
    group = dist.new_group([0, 1])
    if rank > 1:
        return []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 7))
    parallel = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01, gradient_as_bucket_view=True)
    reducer = ScheduledReducer(group, build("halving_doubling", 2, [2]))
    if with_reducer:
        average_with(parallel, reducer)
    for step in range(3):
        torch.manual_seed(100 * rank + step)
        parallel(torch.randn(16, 20)).square().mean().backward()
    reducer.close()
    return [parameter.grad.detach() for parameter in model.parameters() if parameter.grad is not None]


def test_ddp_with_a_scheduled_reducer_has_the_gradients_of_ddp_alone(four: RankPool) -> None:
    expected, averaged = four.run(ddp_gradients, False), four.run(ddp_gradients, True)
    assert len(expected[0]) == 4
    for plain, gradient in zip(expected[0] + expected[1], averaged[0] + averaged[1], strict=True):
        assert torch.equal(plain, gradient)


def reduce_without_rank_2(rank: int, world: int) -> str:
    """Returns the error of this rank. Rank 2 is missing in a group whose ranks have other numbers in the world."""
    dist.barrier()  # no rank is late: sends and receives have the timeout with which their group connects
    group = dist.new_group([1, 2, 3], timeout=timedelta(seconds=2))
    if rank in (0, 2):
        return ""
    reducer = ScheduledReducer(group, build("ring", 3, [3]))
    reducer.start(torch.ones(1000), 5)
    with pytest.raises(CollectiveError) as caught:
        reducer.finish()
    reducer.close()
    return str(caught.value)


def test_a_missing_rank_is_named_by_its_number_in_the_world(four: RankPool) -> None:
    messages = four.run(reduce_without_rank_2)
    for rank in (1, 3):
        assert "ring all-reduce of bucket 5: rank 2 is gone or does not answer" in messages[rank]


def reduce_on_another_device(rank: int, world: int) -> str:
    """Returns the error of a bucket that is not in the memory of a CPU."""
    reducer = ScheduledReducer(world_group(), build("ring", world, [world]))
    with pytest.raises(CollectiveError) as caught:
        reducer.start(torch.empty(3, device="meta"), 4)
    reducer.close()
    return str(caught.value)


def test_gpus_are_refused(four: RankPool) -> None:
    for message in four.run(reduce_on_another_device):
        assert "bucket 4 on meta: only on CPUs" in message


def exit_rank_2(rank: int, world: int, folder: str) -> None:
    """Ends rank 2 between two buckets. The other ranks write the errors that they get into files."""
    reducer = ScheduledReducer(world_group(), build("ring", world, [world]))
    reducer.start(torch.ones(1000), 0)
    reducer.finish()
    if rank == 2:
        os._exit(7)
    try:
        reducer.start(torch.ones(1000), 1)
        reducer.finish()
    except CollectiveError as error:
        (Path(folder) / str(rank)).write_text(str(error))
        with pytest.raises(CollectiveError):
            reducer.start(torch.ones(1000), 2)
        reducer.close()
    os._exit(0)  # as a failed rank does


def test_every_other_rank_names_the_rank_that_died(
    four: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is no neighbor of rank 2 in the ring; its neighbors fail because they lost rank 2."""
    monkeypatch.setattr(ranks_file, "_SETTLE_S", 60.0)
    with pytest.raises(ranks_file.RankFailure):
        four.run(exit_rank_2, str(tmp_path))
    messages = {int(file.name): file.read_text() for file in tmp_path.iterdir()}
    assert set(messages) == {0, 1, 3}
    for text in messages.values():
        assert re.match(r"ring all-reduce of bucket 1: rank 2 is gone", text)


def missing_ranks(rank: int, world: int) -> str:
    """Both ranks report that the other one did not answer."""
    finder = MissingRankFinder(world_group())
    dist.barrier()
    text = finder.describe(1 - rank)
    dist.barrier()
    MissingRankFinder(world_group())  # removes the report
    return text


def test_a_rank_that_is_itself_reported_says_who_gave_up(two: RankPool) -> None:
    assert two.run(missing_ranks) == [
        "rank 1 gave up waiting for this rank, 0",
        "rank 0 gave up waiting for this rank, 1",
    ]
