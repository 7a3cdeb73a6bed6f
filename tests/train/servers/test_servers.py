"""Parameter servers: exact where they are synchronous, measured where they are not, and never beyond the bound. The
servers and workers here are threads of one process, which speak to each other as processes do."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.checkpoint.load import load
from meshwright.checkpoint.manifest import verify
from meshwright.checkpoint.save import save_at
from meshwright.data.order import permutation
from meshwright.errors import CollectiveError, InputError
from meshwright.launch.peer_connection import PeerConnection
from meshwright.plan import Plan
from meshwright.proof.prove import check_request
from meshwright.proof.request import ProofRequest
from meshwright.train.check import check_servers
from meshwright.train.servers.assignment import assign_parameters, is_elementwise
from meshwright.train.servers.clocks import WorkerClocks
from meshwright.train.servers.messages import ServerReply, WorkerReport
from meshwright.train.servers.momentum import PerWorkerMomentum
from meshwright.train.servers.server import Server
from meshwright.train.servers.server_group import ServerGroup
from meshwright.train.servers.training_spec import TrainingSpec
from meshwright.train.session import Session
from tests.ranks import RankPool
from tests.soaked import all_but
from tests.train.runs.test_equal_to_one_process import BATCH, CASES, Points, Tied, assert_equal, bare_loop, make
from tests.train.servers.in_threads import ONE_RANK, Case, Died, TrainingResult, train_in_threads

STEPS = 10  # two epochs of Points


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def plan_of(workers: int, servers: int, **more: Any) -> Plan:
    gradients = {"servers": servers, **more.pop("gradients", {})}
    return Plan.model_validate({"axes": {"replicate": workers}, "gradients": gradients, **more})


def case_of(name: str, plan: Plan, **more: Any) -> Case:
    case = CASES[name]

    def make_model_and_optimizer() -> tuple[nn.Module, Any]:
        model, _ = make(case)
        # As one group: a server may have nothing of it, where there are more servers than rows.
        return model, lambda parameters: torch.optim.AdamW(
            [{"params": list(parameters.values())}], lr=0.01, weight_decay=0.1
        )

    return Case(make_model_and_optimizer, Points(case[1]), case[2], BATCH, plan, more.pop("steps", STEPS), **more)


# ---- which server holds which rows


def test_assigned_rows_are_balanced_and_cover_every_parameter_once() -> None:
    shapes = {"large": (100, 30), "middle": (40, 10), "bias": (7,), "number": (), "small": (5, 5)}
    parameters = {name: torch.randn(shape) for name, shape in shapes.items()}
    assignment = assign_parameters(parameters, 3, cut=True)
    loads = [sum(torch.Size(part.shape).numel() for part in rows) for rows in assignment]
    assert max(loads) - min(loads) < 60
    whole = {name: torch.full_like(tensor, float("nan")) for name, tensor in parameters.items()}
    for rows in assignment:
        assert len({part.name for part in rows}) == len(rows)
        for part in rows:
            part.view(whole[part.name]).copy_(part.view(parameters[part.name]))
    assert all(torch.equal(whole[name], tensor) for name, tensor in parameters.items())


def test_optimizers_that_are_not_elementwise_get_whole_parameters() -> None:
    parameters = {"weight": torch.zeros(64, 8), "bias": torch.zeros(8)}
    assert is_elementwise(torch.optim.AdamW([torch.zeros(1)]))
    assert not is_elementwise(torch.optim.Adafactor([nn.Parameter(torch.zeros(2, 2))]))
    assignment = assign_parameters(parameters, 2, cut=False)
    assert [[part.shape for part in rows] for rows in assignment] == [[(64, 8)], [(8,)]]


def test_messages_survive_packing_and_unpacking() -> None:
    report = WorkerReport(kind=1, version=2**60, samples=3, count=1.5, loss=-0.25, scale=65536.0)
    assert WorkerReport.unpack(report.pack()) == report
    reply = ServerReply(instruction=4, seed=2**62 + 1, loss=float("inf"))
    assert ServerReply.unpack(reply.pack()) == reply


# ---- synchronous


def train_equal(case: Case, name: str) -> TrainingResult:
    trained = train_in_threads(case)
    expected = bare_loop(CASES[name])
    for weights in trained.weights.values():
        assert_equal((weights, trained.losses), expected)
    return trained


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("name", [name for name in CASES if name != "unused parameters"])
def test_synchronous_servers_train_as_one_process_does(name: str, servers: int) -> None:
    plan = plan_of(2, servers, memory={"accumulation": CASES[name][3]})
    trained = train_equal(case_of(name, plan, clip_norm=0.5), name)
    assert trained.coordinator.staleness.largest == 0
    assert trained.coordinator.version == STEPS


@pytest.mark.parametrize(("workers", "servers"), all_but([(3, 2)], [(1, 1), (3, 2), (4, 3), (2, 5)]))
def test_any_number_of_workers_and_servers_trains_the_same(workers: int, servers: int) -> None:
    """The last batch of an epoch has one sample: all workers but one go without."""
    train_equal(case_of("ignored targets", plan_of(workers, servers), clip_norm=0.5), "ignored targets")


def test_parameters_that_no_worker_used_have_no_gradient() -> None:
    """With a gradient of zero AdamW would decay them."""

    class PartlyUsed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(64, 4), nn.Linear(3, 3)

        def forward(self, image: Tensor) -> Tensor:
            out: Tensor = self.used(image.flatten(1))
            return out

    def make_model_and_optimizer() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        return PartlyUsed().double(), lambda parameters: torch.optim.AdamW(
            parameters.values(), lr=0.01, weight_decay=0.1
        )

    case = Case(make_model_and_optimizer, Points("tuple"), nn.functional.cross_entropy, BATCH, plan_of(2, 2), 3)
    weights = train_in_threads(case).weights[1]
    start = make_model_and_optimizer()[0].state_dict()
    assert torch.equal(weights["idle.weight"], start["idle.weight"])
    assert not torch.equal(weights["used.weight"], start["used.weight"])


def test_the_schedule_counts_steps_of_the_run() -> None:
    def halving(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)

    expected = [0.01 * 0.5 ** ((step + 1) // 4) for step in range(8)]
    for updates in ("synchronous", "asynchronous"):
        plan = plan_of(2, 2, gradients={"updates": updates})
        assert train_in_threads(case_of("plain", plan, steps=8, schedule=halving)).rates == pytest.approx(expected)


@pytest.mark.parametrize("updates", ["synchronous", "asynchronous"])
def test_updates_with_gradients_that_overflow_fp16_are_skipped(updates: str) -> None:
    """A loss of thousands times the loss scale overflows fp16: until the scale is small enough, no update is made."""

    def make_model_and_optimizer() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
        return model, lambda parameters: torch.optim.SGD(list(parameters.values()), lr=1e-4)

    def large(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target) * 1000

    plan = plan_of(2, 1, gradients={"updates": updates}, numerics={"precision": "fp16"})
    trained = train_in_threads(Case(make_model_and_optimizer, _Singles(), large, BATCH, plan, 30))
    coordinator = trained.coordinator
    pushes = 30 if updates == "synchronous" else 60
    assert 0 < coordinator.version < pushes
    assert coordinator.participants.loss_scale[0] < 2**16
    assert all(bool(value.isfinite().all()) for value in trained.weights[0].values())


# ---- asynchronous and bounded


@pytest.mark.parametrize("servers", [1, 2])
def test_asynchronous_gradients_are_applied_as_they_arrive(servers: int) -> None:
    trained = train_in_threads(case_of("plain", plan_of(2, servers, gradients={"updates": "asynchronous"}), steps=20))
    assert len(trained.losses) == 20
    assert trained.coordinator.version == trained.coordinator.staleness.pushes == 40
    assert 0 < trained.coordinator.staleness.mean <= trained.coordinator.staleness.largest
    assert sum(trained.losses[-5:]) < sum(trained.losses[:5])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momentum_stays_stable_under_asynchrony(momentum: float) -> None:
    """Two workers in turn on x²/2 · 20, each gradient one update late: with one momentum for both, 0.9 + 0.01 · 20 > 1
    would let it grow without end. Computed here as the paper has it."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.02, momentum=momentum)
    if not momentum:
        assert not PerWorkerMomentum.applies_to(optimizer)
        return
    assert PerWorkerMomentum.applies_to(optimizer)
    per_worker = PerWorkerMomentum(optimizer, rate=0.5)
    x, moving, sent = 1.0, [0.0, 0.0], [1.0, 1.0]
    for turn in range(200):
        worker = turn % 2
        weight.grad = torch.tensor([20 * sent[worker]], dtype=torch.float64)
        optimizer.param_groups[0]["lr"] = 0.01
        with per_worker.of_worker(worker):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.02
        moving[worker] = momentum * moving[worker] + 20 * sent[worker]
        x -= 0.01 * moving[worker]
        assert float(weight.detach()) == pytest.approx(x, rel=1e-9, abs=1e-12)
        sent[worker] = float(per_worker.look_ahead()[weight])
        assert sent[worker] == pytest.approx(x - 0.01 * momentum * sum(moving), rel=1e-9, abs=1e-12)
    assert abs(x) < 1e-3
    assert float(optimizer.state[weight]["momentum_buffer"]) == pytest.approx(sum(moving) / 2, abs=1e-9)


@pytest.mark.parametrize(("bound", "servers"), [(0, 1), (1, 2), (3, 1)])
def test_no_worker_is_further_ahead_than_the_bound(bound: int, servers: int) -> None:
    """Worker 0 waits before its third step until the others have begun the last one that they are allowed. When it goes
    on, none of them may have begun another."""
    begun = [0, 0, 0]
    furthest = threading.Barrier(3)
    largest_begun: list[int] = []

    def before(worker: int, step: int) -> None:
        begun[worker] = step
        if step == (2 if worker == 0 else 2 + bound):
            furthest.wait(30)
        if worker == 0 and step == 2:
            largest_begun.append(max(begun))

    plan = plan_of(3, servers, gradients={"updates": "bounded", "staleness": bound})
    trained = train_in_threads(case_of("plain", plan, steps=12, before=before))
    assert trained.coordinator.clocks.largest_lead == bound
    assert largest_begun == [2 + bound]
    assert len(trained.losses) == 12


def test_the_bound_is_asserted_on_every_reply() -> None:
    clocks = WorkerClocks(bound=1)
    clocks.add(0, 4)
    clocks.add(1, 6)
    assert not clocks.may_continue(1)
    with pytest.raises(AssertionError, match="2 steps ahead, 1 allowed"):
        clocks.note_continued(1)
    clocks.remove(0)  # a worker that is gone does not hold others back
    clocks.note_continued(1)
    assert clocks.add(0) == 6, "a worker that comes back gets the clock of the slowest"


def test_a_step_of_the_run_is_complete_when_the_shares_of_one_batch_are() -> None:
    clocks = WorkerClocks(total=3)
    for worker in range(3):
        clocks.add(worker, 0)
    steps = []
    for worker in (0, 0, 1, 0, 1, 2, 1, 2, 2):
        clocks.advance(worker)
        steps.append(clocks.step)
    assert steps == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert clocks.all_finished


# ---- workers that die


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("updates", ["synchronous", "asynchronous", "bounded"])
def test_the_run_continues_without_a_dead_worker_until_it_is_back(updates: str, servers: int) -> None:
    """Worker 1 dies before its fourth step; the others pass five more, then it is there again, and all finish."""
    dead, again, back = threading.Event(), threading.Event(), threading.Event()

    def before(worker: int, step: int) -> None:
        if worker == 1 and not again.is_set() and step == 3:
            dead.set()
            raise Died
        if worker == 1 and again.is_set():
            back.set()
        if worker == 0 and step == 8:
            assert dead.wait(30)  # where nobody waits for anybody, worker 0 may be here first
            again.set()
        if worker == 0 and step == 9:
            assert back.wait(30)

    plan = plan_of(2, servers, gradients={"updates": updates, "staleness": 1})
    trained = train_in_threads(case_of("plain", plan, steps=16, before=before, revive=again))
    assert len(trained.losses) == 16
    assert trained.coordinator.participants.rejoined == 1
    printed = " ".join(trained.printed)
    assert "worker 1 is gone after step" in printed
    assert "worker 1 is back, at batch" in printed
    if updates == "synchronous":
        assert "the mean is over the samples of the others" in printed
        assert all(torch.equal(value, trained.weights[1][name]) for name, value in trained.weights[0].items())


def test_the_mean_is_over_the_gradients_that_arrived() -> None:
    """Without worker 1, each step is one on the first half of its batch alone."""

    def before(worker: int, step: int) -> None:
        if worker == 1:
            raise Died

    half = Points("tuple")
    case = case_of("own loss", plan_of(2, 1), steps=1, before=before)
    weights = train_in_threads(case).weights[0]
    alone = case_of("own loss", plan_of(1, 1), steps=1)
    chosen = permutation(case.seed, 0, len(half))[: BATCH // 2]
    model, make_optimizer = alone.make()
    optimizer = make_optimizer(dict(model.named_parameters()))
    case.loss(model(half.x[chosen]), half.y[chosen]).backward()
    optimizer.step()
    assert_equal((weights, []), (model.state_dict(), []))


def test_a_dead_peer_is_named() -> None:
    for closes, message in ((False, "receive: no answer within 1 s from"), (True, "receive: the connection to")):
        store = dist.HashStore()
        made: list[PeerConnection] = []
        other = threading.Thread(target=_append_pair, args=(made, store))
        other.start()
        mine = PeerConnection(store, True, "worker 1 (rank 1)", 1.0)
        other.join()
        if closes:
            made[0].close()
        with pytest.raises(CollectiveError, match=rf"{message} worker 1 \(rank 1\)"):
            mine.receive(torch.zeros(1))


def _append_pair(made: list[PeerConnection], store: dist.Store) -> None:
    made.append(PeerConnection(store, False, "server 0 (rank 2)", 5.0))


# ---- checkpoints


def tied_spec() -> TrainingSpec:
    torch.manual_seed(0)
    model = Tied()
    model.register_buffer("seen", torch.zeros(3))
    model.encode.weight.requires_grad_(False)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in parameters.values() if p.requires_grad], lr=0.01)

    return TrainingSpec(model, optimizer, None, "step", None, 7)


def server_of(rank: int, servers: int, store: dist.Store | None = None) -> Server:
    own = store or dist.HashStore()
    return Server(tied_spec(), plan_of(2, servers), ServerGroup(own, rank, servers, 30), lambda: dist.HashStore(), 30)


def saved_here(rank: int, size: int, before: Path, after: Path) -> None:
    """Loads a checkpoint into that many servers, and saves it again."""
    store = dist.PrefixStore(str(after), dist.distributed_c10d._get_default_store())
    server = server_of(rank, size, store)
    server.restore(before, verify(before).about)
    save_at(server.state(), after, server.steps, server.about())


def test_checkpoints_load_with_any_number_of_servers_and_without(two: RankPool, tmp_path: Path) -> None:
    """From one process to two servers, to one, and back: weights, frozen and tied ones, buffers, optimizer state."""
    spec = tied_spec()
    session = Session(spec.model, spec.make_optimizer, loss=nn.functional.cross_entropy, plan=Plan(), world=ONE_RANK)
    for batch in session.batches(_Singles(), 1, 8):
        session.step(batch)
    spec.model.get_buffer("seen").add_(3)
    session.save(tmp_path / "plain")
    two.run(saved_here, tmp_path / "plain", tmp_path / "two")
    one = server_of(0, 1)
    one.restore(tmp_path / "two", verify(tmp_path / "two").about)
    assert (one.steps, one.position) == (session.steps, session.position)
    save_at(one.state(), tmp_path / "one", one.steps, one.about())
    for name in ("two", "one"):
        fresh = tied_spec()
        optimizer = fresh.make_optimizer(dict(fresh.model.named_parameters()))
        load(tmp_path / name, fresh.model, optimizer)
        expected, found = session.module.state_dict(), fresh.model.state_dict()
        assert expected.keys() == found.keys()
        assert all(torch.equal(value, found[key]) for key, value in expected.items())
        mine, theirs = session.optimizer.state_dict()["state"], optimizer.state_dict()["state"]
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[n]["exp_avg_sq"], theirs[n]["exp_avg_sq"]) for n in mine)


def test_workers_of_an_asynchronous_run_resume_at_their_own_positions() -> None:
    plan = plan_of(2, 1, gradients={"updates": "asynchronous"})
    server = Server(tied_spec(), plan, ServerGroup(dist.HashStore(), 0, 1, 30), lambda: dist.HashStore(), 30)
    server.steps, server.position = 6, (1, 1)
    server.coordinator.positions = {5: (1, 0), 6: (1, 1), 7: (1, 2)}
    server.coordinator.clocks.by_worker = {0: 5, 1: 7}
    about = server.about()
    for workers, starts in ((2, {0: 5, 1: 7}), (3, {})):
        plan = plan_of(workers, 1, gradients={"updates": "asynchronous"})
        again = Server(tied_spec(), plan, ServerGroup(dist.HashStore(), 0, 1, 30), lambda: dist.HashStore(), 30)
        again.steps, again.position = 6, (1, 1)
        again._restore_coordinator(about)
        assert again.coordinator.participants.start_clocks == starts
        assert again.coordinator.clocks.step == 6
        assert again.coordinator.position_at(6) == (1, 1)


class _Singles(Points):
    def __init__(self) -> None:
        super().__init__("tuple")
        self.x = self.x.float()


# ---- refusals


def test_what_cannot_be_combined_with_servers_is_refused() -> None:
    check_servers(plan_of(2, 1))
    with pytest.raises(InputError, match="batch_norm is synchronized"):
        check_servers(plan_of(2, 1, numerics={"batch_norm": "synchronized"}))
    with pytest.raises(InputError, match="cuda_graphs"):
        check_servers(plan_of(1, 1, compute={"cuda_graphs": True}))
    asked = ProofRequest(subject=None, plan=plan_of(2, 1, gradients={"updates": "asynchronous"}))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="prove takes synchronous ones"):
        check_request(asked)


def test_a_session_refuses_a_plan_with_servers() -> None:
    spec = tied_spec()
    with pytest.raises(InputError, match="`meshwright train` starts"):
        Session(spec.model, spec.make_optimizer, loss=None, plan=plan_of(1, 1), world=ONE_RANK)
