"""Checkpoints of parameter servers load with any number of servers and in one process."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.checkpoint.load import load
from meshwright.checkpoint.reader import verify
from meshwright.checkpoint.save import save_at
from meshwright.plan import Plan
from meshwright.train.servers.server import Server
from meshwright.train.servers.server_group import ServerGroup
from meshwright.train.session import Session
from tests.ranks import RankPool
from tests.train.one_process import equal_states
from tests.train.servers.in_threads import ONE_RANK
from tests.train.servers.server_cases import Fp32Points, server_plan, tied_spec

pytestmark = pytest.mark.usefixtures("loopback")


def make_server(rank: int, servers: int, store: dist.Store | None = None, plan: Plan | None = None) -> Server:
    group = ServerGroup(store or dist.HashStore(), rank, servers, 30)
    return Server(tied_spec(), plan or server_plan(2, servers), group, lambda: dist.HashStore(), 30)


def load_and_save(rank: int, size: int, before: Path, after: Path) -> None:
    """Loads the checkpoint `before` into as many servers as there are ranks, and saves it as `after`."""
    store = dist.PrefixStore(str(after), dist.distributed_c10d._get_default_store())
    server = make_server(rank, size, store)
    server.restore(before, verify(before))
    save_at(server.state(), after, server.steps, server.about())


def test_checkpoints_load_with_any_number_of_servers_and_without(two: RankPool, tmp_path: Path) -> None:
    """A checkpoint goes from one process to two servers, to one server, and back, with frozen and tied weights, buffers
    and optimizer state."""
    spec = tied_spec()
    session = Session(spec.model, spec.make_optimizer, loss=nn.functional.cross_entropy, plan=Plan(), world=ONE_RANK)
    for batch in session.batches(Fp32Points(), 1, 8):
        session.step(batch)
    spec.model.get_buffer("seen").add_(3)
    session.save(tmp_path / "plain")
    two.run(load_and_save, tmp_path / "plain", tmp_path / "two")
    single = make_server(0, 1)
    single.restore(tmp_path / "two", verify(tmp_path / "two"))
    assert (single.steps, single.position) == (session.steps, session.position)
    save_at(single.state(), tmp_path / "one", single.steps, single.about())
    for name in ("two", "one"):
        fresh = tied_spec()
        optimizer = fresh.make_optimizer(dict(fresh.model.named_parameters()))
        load(tmp_path / name, verify(tmp_path / name), fresh.model, optimizer)
        assert equal_states(fresh.model.state_dict(), session.module.state_dict())
        expected, loaded = session.optimizer.state_dict()["state"], optimizer.state_dict()["state"]
        assert expected.keys() == loaded.keys()
        assert all(torch.equal(expected[n]["exp_avg_sq"], loaded[n]["exp_avg_sq"]) for n in expected)


def test_workers_of_an_asynchronous_run_resume_at_their_own_positions() -> None:
    plan = server_plan(2, 1, gradients={"updates": "asynchronous"})
    server = make_server(0, 1, plan=plan)
    server.steps, server.position = 6, (1, 1)
    server.coordinator.positions = {5: (1, 0), 6: (1, 1), 7: (1, 2)}
    server.coordinator.clocks.by_worker = {0: 5, 1: 7}
    about = server.about()
    for workers, starts in ((2, {0: 5, 1: 7}), (3, {})):
        plan = server_plan(workers, 1, gradients={"updates": "asynchronous"})
        resumed = make_server(0, 1, plan=plan)
        resumed.steps, resumed.position = 6, (1, 1)
        resumed._restore_coordinator(about)
        assert resumed.coordinator.participants.start_clocks == starts
        assert resumed.coordinator.clocks.step == 6
        assert resumed.coordinator.position_at(6) == (1, 1)
