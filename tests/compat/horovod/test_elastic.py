"""The state of elastic training is the same on all workers after `sync`, and after a failure that of the last
commit."""

from typing import Any

import pytest
import torch

import meshwright.compat.horovod as hvd
from meshwright.compat.horovod.elastic.state import HostUpdateResult
from tests.compat.horovod.world import run_horovod
from tests.ranks import RankPool


def _state() -> None:
    rank = hvd.rank()
    torch.manual_seed(rank)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 + rank)
    sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
    sampler.record_batch(0, 1 + rank)
    state: Any = hvd.elastic.TorchState(model, optimizer, sampler=sampler, batch=rank, seen=[rank])
    state.sync()
    assert (state.batch, state.seen, sampler.processed_num) == (0, [0], hvd.size())
    assert optimizer.param_groups[0]["lr"] == 0.1
    weights = hvd.allgather_object(model.weight.tolist())
    assert all(other == weights[0] for other in weights)
    state.batch, state.seen = 4, [1, 2]
    state.commit()
    state.batch = 5
    state.seen.append(3)
    model.weight.data.zero_()
    sampler.record_batch(1, 2)
    state.restore()
    assert (state.batch, state.seen, sampler.processed_num) == (4, [1, 2], hvd.size())
    assert model.weight.tolist() == weights[0]
    replacement = torch.nn.Linear(2, 1)
    state.model = replacement
    state.restore()
    assert state.model is replacement


def test_a_state_is_synchronized_committed_and_restored(world: RankPool | None) -> None:
    run_horovod(world, _state)


def _samples() -> list[list[int]]:
    sampler = hvd.elastic.ElasticSampler(range(7), seed=1)
    parts = [hvd.allgather_object(list(sampler))]
    sampler.set_epoch(1)
    sampler.record_batch(0, 1)
    sampler.reset()
    assert len(sampler) == -(-(7 - hvd.size()) // hvd.size())
    parts.append(hvd.allgather_object(list(sampler)))
    return [sorted({index for part in of_ranks for index in part}) for of_ranks in parts]


def test_a_sampler_divides_what_is_left_of_an_epoch(world: RankPool | None) -> None:
    for everything, rest in (result for result in run_horovod(world, _samples)):
        assert everything == list(range(7))
        assert len(rest) == 7 - (1 if world is None else world.world_size)


def _interrupted(kind: int) -> list[str]:
    """Returns what happens when rank 0 alone hears that hosts have changed, and a collective fails once on rank 0: it
    leaves the other rank in the middle of that collective."""
    events: list[str] = []
    state: Any = hvd.elastic.TorchState(torch.nn.Linear(1, 1), None, batch=0)
    state.register_reset_callbacks([lambda: events.append(f"reset to {hvd.size()} ranks")])
    synchronize = state.sync

    def recorded_sync() -> None:
        events.append("sync")
        synchronize()

    state.sync = recorded_sync

    @hvd.elastic.run
    def train(state: Any) -> str:
        events.append(f"batch {state.batch}")
        if state.batch == 0:
            state.batch = 1
            state.commit()
            state.batch = 9
            if hvd.rank() == 0:
                raise hvd.HorovodInternalError("a collective failed")
            hvd.allreduce(torch.ones(1))
        if state.batch == 1:
            state.batch = 2
            if hvd.rank() == 0:
                state.on_hosts_updated(1.0, kind)
            state.commit()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
        return "trained"

    events.append(train(state))
    return events


@pytest.mark.parametrize("kind", [HostUpdateResult.added, HostUpdateResult.removed])
def test_training_runs_again_after_failures_and_changes_of_hosts(two: RankPool, kind: HostUpdateResult) -> None:
    last_sync = ["sync"] if kind == HostUpdateResult.added else []
    expected = ["sync", "batch 0", "reset to 2 ranks", "sync", "batch 1", "reset to 2 ranks", *last_sync, "batch 2"]
    assert run_horovod(two, _interrupted, int(kind)) == [[*expected, "trained"]] * 2


def _mismatch() -> str:
    state: Any = hvd.elastic.TorchState(torch.nn.Linear(1, 1), None, batch=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        hvd.allreduce(torch.ones(1 + hvd.rank()))

    with pytest.raises(hvd.HorovodInternalError) as caught:
        train(state)
    return str(caught.value)


def test_a_mismatch_ends_training_instead_of_repeating_it(two: RankPool) -> None:
    assert all("mismatched shapes" in text for text in run_horovod(two, _mismatch))
