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
from meshwright.launch.pairs import Pair
from meshwright.plan import Plan
from meshwright.proof.prove import check_question
from meshwright.proof.question import Question
from meshwright.train.check import check_servers
from meshwright.train.servers.assignment import divide, works_by_number
from meshwright.train.servers.clocks import Clocks
from meshwright.train.servers.messages import Reply, Told
from meshwright.train.servers.momentum import OwnMomentum
from meshwright.train.servers.recipe import Recipe
from meshwright.train.servers.server import Serving
from meshwright.train.servers.team import Team
from meshwright.train.session import Session
from tests.ranks import RankPool
from tests.soaked import all_but
from tests.train.runs.test_equal_to_one_process import BATCH, CASES, Points, Tied, assert_equal, bare_loop, make
from tests.train.servers.served import ALONE, Case, Died, Trained, train_in_threads

STEPS = 10  # two epochs of Points


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def plan_of(workers: int, servers: int, **more: Any) -> Plan:
    gradients = {"servers": servers, **more.pop("gradients", {})}
    return Plan.model_validate({"axes": {"replicate": workers}, "gradients": gradients, **more})


def case_of(name: str, plan: Plan, **more: Any) -> Case:
    case = CASES[name]

    def made() -> tuple[nn.Module, Any]:
        model, _ = make(case)
        # As one group: a server may have nothing of it, where there are more servers than rows.
        return model, lambda held: torch.optim.AdamW([{"params": list(held.values())}], lr=0.01, weight_decay=0.1)

    return Case(made, Points(case[1]), case[2], BATCH, plan, more.pop("steps", STEPS), **more)


# ---- who holds what


def test_pieces_are_balanced_and_make_up_the_whole() -> None:
    shapes = {"large": (100, 30), "middle": (40, 10), "bias": (7,), "number": (), "small": (5, 5)}
    parameters = {name: torch.randn(shape) for name, shape in shapes.items()}
    held = divide(parameters, 3, cut=True)
    loads = [sum(torch.Size(piece.shape).numel() for piece in pieces) for pieces in held]
    assert max(loads) - min(loads) < 60
    whole = {name: torch.full_like(tensor, float("nan")) for name, tensor in parameters.items()}
    for pieces in held:
        assert len({piece.name for piece in pieces}) == len(pieces)
        for piece in pieces:
            piece.of(whole[piece.name]).copy_(piece.of(parameters[piece.name]))
    assert all(torch.equal(whole[name], tensor) for name, tensor in parameters.items())


def test_an_optimizer_that_looks_at_whole_parameters_is_given_whole_ones() -> None:
    parameters = {"weight": torch.zeros(64, 8), "bias": torch.zeros(8)}
    assert works_by_number(torch.optim.AdamW([torch.zeros(1)]))
    assert not works_by_number(torch.optim.Adafactor([nn.Parameter(torch.zeros(2, 2))]))
    held = divide(parameters, 2, cut=False)
    assert [[piece.shape for piece in pieces] for pieces in held] == [[(64, 8)], [(8,)]]


def test_headers_come_back_as_they_were() -> None:
    told = Told(said=1, version=2**60, samples=3, count=1.5, loss=-0.25, scale=65536.0)
    assert Told.unpack(told.pack()) == told
    reply = Reply(do=4, seed=2**62 + 1, loss=float("inf"))
    assert Reply.unpack(reply.pack()) == reply


# ---- synchronous


def train_equal(case: Case, name: str) -> Trained:
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
    assert trained.lead.staleness.largest == 0
    assert trained.lead.version == STEPS


@pytest.mark.parametrize(("workers", "servers"), all_but([(3, 2)], [(1, 1), (3, 2), (4, 3), (2, 5)]))
def test_any_number_of_workers_and_servers_will_do(workers: int, servers: int) -> None:
    """The last batch of an epoch has one sample: all workers but one go without."""
    train_equal(case_of("ignored targets", plan_of(workers, servers), clip_norm=0.5), "ignored targets")


def test_parameters_that_no_worker_used_have_no_gradient() -> None:
    """AdamW would decay them otherwise."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(64, 4), nn.Linear(3, 3)

        def forward(self, image: Tensor) -> Tensor:
            out: Tensor = self.used(image.flatten(1))
            return out

    def made() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        return Partly().double(), lambda held: torch.optim.AdamW(held.values(), lr=0.01, weight_decay=0.1)

    case = Case(made, Points("tuple"), nn.functional.cross_entropy, BATCH, plan_of(2, 2), 3)
    weights = train_in_threads(case).weights[1]
    start = made()[0].state_dict()
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
def test_gradients_that_fp16_is_too_small_for_are_left_out(updates: str) -> None:
    """A loss of thousands times the factor is no number of fp16: until the factor is small enough, nothing moves."""

    def made() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
        return model, lambda held: torch.optim.SGD(list(held.values()), lr=1e-4)

    def large(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target) * 1000

    plan = plan_of(2, 1, gradients={"updates": updates}, numerics={"precision": "fp16"})
    trained = train_in_threads(Case(made, _Singles(), large, BATCH, plan, 30))
    lead = trained.lead
    pushes = 30 if updates == "synchronous" else 60
    assert 0 < lead.version < pushes
    assert lead.loss_scale[0] < 2**16
    assert all(bool(value.isfinite().all()) for value in trained.weights[0].values())


# ---- asynchronous and bounded


@pytest.mark.parametrize("servers", [1, 2])
def test_asynchronous_gradients_are_applied_as_they_come(servers: int) -> None:
    trained = train_in_threads(case_of("plain", plan_of(2, servers, gradients={"updates": "asynchronous"}), steps=20))
    assert len(trained.losses) == 20
    assert trained.lead.version == trained.lead.staleness.pushes == 40
    assert 0 < trained.lead.staleness.mean <= trained.lead.staleness.largest
    assert sum(trained.losses[-5:]) < sum(trained.losses[:5])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momentum_stays_stable_under_asynchrony(momentum: float) -> None:
    """Two workers in turn on x²/2 · 20, each gradient one update late: with one momentum for both, 0.9 + 0.01 · 20 > 1
    would let it grow without end. Computed here as the paper has it."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.02, momentum=momentum)
    if not momentum:
        assert not OwnMomentum.helps(optimizer)
        return
    assert OwnMomentum.helps(optimizer)
    own = OwnMomentum(optimizer, rate=0.5)
    x, moving, sent = 1.0, [0.0, 0.0], [1.0, 1.0]
    for turn in range(200):
        worker = turn % 2
        weight.grad = torch.tensor([20 * sent[worker]], dtype=torch.float64)
        optimizer.param_groups[0]["lr"] = 0.01
        with own.of(worker):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.02
        moving[worker] = momentum * moving[worker] + 20 * sent[worker]
        x -= 0.01 * moving[worker]
        assert float(weight.detach()) == pytest.approx(x, rel=1e-9, abs=1e-12)
        sent[worker] = float(own.ahead()[weight])
        assert sent[worker] == pytest.approx(x - 0.01 * momentum * sum(moving), rel=1e-9, abs=1e-12)
    assert abs(x) < 1e-3
    assert float(optimizer.state[weight]["momentum_buffer"]) == pytest.approx(sum(moving) / 2, abs=1e-9)


@pytest.mark.parametrize(("bound", "servers"), [(0, 1), (1, 2), (3, 1)])
def test_nobody_is_further_ahead_than_the_bound(bound: int, servers: int) -> None:
    """Worker 0 waits before its third step until the others have begun the last one that they are allowed. When it goes
    on, none of them may have begun another."""
    begun = [0, 0, 0]
    furthest = threading.Barrier(3)
    seen: list[int] = []

    def before(worker: int, step: int) -> None:
        begun[worker] = step
        if step == (2 if worker == 0 else 2 + bound):
            furthest.wait(30)
        if worker == 0 and step == 2:
            seen.append(max(begun))

    plan = plan_of(3, servers, gradients={"updates": "bounded", "staleness": bound})
    trained = train_in_threads(case_of("plain", plan, steps=12, before=before))
    assert trained.lead.clocks.largest_lead == bound
    assert seen == [2 + bound]
    assert len(trained.losses) == 12


def test_the_bound_is_asserted_on_every_reply() -> None:
    clocks = Clocks(bound=1)
    clocks.join(0, 4)
    clocks.join(1, 6)
    assert not clocks.may_go_on(1)
    with pytest.raises(AssertionError, match="2 steps ahead, 1 allowed"):
        clocks.go_on(1)
    clocks.drop(0)  # whoever is gone holds nobody back
    clocks.go_on(1)
    assert clocks.join(0) == 6, "who comes back stands beside the slowest"


def test_a_step_of_the_run_is_a_batchs_worth_of_shares() -> None:
    clocks = Clocks(total=3)
    for worker in range(3):
        clocks.join(worker, 0)
    seen = []
    for worker in (0, 0, 1, 0, 1, 2, 1, 2, 2):
        clocks.advance(worker)
        seen.append(clocks.step)
    assert seen == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert clocks.over


# ---- deaths


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("updates", ["synchronous", "asynchronous", "bounded"])
def test_a_dead_worker_is_done_without_and_comes_back(updates: str, servers: int) -> None:
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
    assert trained.lead.rejoined == 1
    said = " ".join(trained.said)
    assert "worker 1 is gone after step" in said
    assert "worker 1 is back, at batch" in said
    if updates == "synchronous":
        assert "the mean is over the samples of the others" in said
        assert all(torch.equal(value, trained.weights[1][name]) for name, value in trained.weights[0].items())


def test_gradients_of_those_who_came_make_the_mean() -> None:
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
        made: list[Pair] = []
        other = threading.Thread(target=_append_pair, args=(made, store))
        other.start()
        mine = Pair(store, True, "worker 1 (rank 1)", 1.0)
        other.join()
        if closes:
            made[0].close()
        with pytest.raises(CollectiveError, match=rf"{message} worker 1 \(rank 1\)"):
            mine.receive(torch.zeros(1))


def _append_pair(made: list[Pair], store: dist.Store) -> None:
    made.append(Pair(store, False, "server 0 (rank 2)", 5.0))


# ---- checkpoints


def tied_recipe() -> Recipe:
    torch.manual_seed(0)
    model = Tied()
    model.register_buffer("seen", torch.zeros(3))
    model.encode.weight.requires_grad_(False)

    def optimizer(held: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in held.values() if p.requires_grad], lr=0.01)

    return Recipe(model, optimizer, None, "step", None, 7)


def serving_of(rank: int, servers: int, store: dist.Store | None = None) -> Serving:
    own = store or dist.HashStore()
    return Serving(tied_recipe(), plan_of(2, servers), Team(own, rank, servers, 30), lambda: dist.HashStore(), 30)


def saved_here(rank: int, size: int, before: Path, after: Path) -> None:
    """Loads a checkpoint into that many servers, and saves it again."""
    store = dist.PrefixStore(str(after), dist.distributed_c10d._get_default_store())
    serving = serving_of(rank, size, store)
    serving.restore(before, verify(before).about)
    save_at(serving.state(), after, serving.steps, serving.about())


def test_checkpoints_know_nothing_of_servers(two: RankPool, tmp_path: Path) -> None:
    """From one process to two servers, to one, and back: weights, frozen and tied ones, buffers, optimizer state."""
    recipe = tied_recipe()
    session = Session(recipe.model, recipe.make_optimizer, loss=nn.functional.cross_entropy, plan=Plan(), world=ALONE)
    for batch in session.batches(_Singles(), 1, 8):
        session.step(batch)
    recipe.model.get_buffer("seen").add_(3)
    session.save(tmp_path / "plain")
    two.run(saved_here, tmp_path / "plain", tmp_path / "two")
    one = serving_of(0, 1)
    one.restore(tmp_path / "two", verify(tmp_path / "two").about)
    assert (one.steps, one.position) == (session.steps, session.position)
    save_at(one.state(), tmp_path / "one", one.steps, one.about())
    for name in ("two", "one"):
        fresh = tied_recipe()
        optimizer = fresh.make_optimizer(dict(fresh.model.named_parameters()))
        load(tmp_path / name, fresh.model, optimizer)
        expected, found = session.module.state_dict(), fresh.model.state_dict()
        assert expected.keys() == found.keys()
        assert all(torch.equal(value, found[key]) for key, value in expected.items())
        mine, theirs = session.optimizer.state_dict()["state"], optimizer.state_dict()["state"]
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[n]["exp_avg_sq"], theirs[n]["exp_avg_sq"]) for n in mine)


def test_workers_of_an_asynchronous_run_go_on_where_each_was() -> None:
    plan = plan_of(2, 1, gradients={"updates": "asynchronous"})
    serving = Serving(tied_recipe(), plan, Team(dist.HashStore(), 0, 1, 30), lambda: dist.HashStore(), 30)
    serving.steps, serving.position = 6, (1, 1)
    serving.lead.positions = {5: (1, 0), 6: (1, 1), 7: (1, 2)}
    serving.lead.clocks.alive = {0: 5, 1: 7}
    about = serving.about()
    for workers, starts in ((2, {0: 5, 1: 7}), (3, {})):
        plan = plan_of(workers, 1, gradients={"updates": "asynchronous"})
        again = Serving(tied_recipe(), plan, Team(dist.HashStore(), 0, 1, 30), lambda: dist.HashStore(), 30)
        again.steps, again.position = 6, (1, 1)
        again._restore_lead(about)
        assert again.lead.starts == starts
        assert again.lead.clocks.step == 6
        assert again.lead.position_at(6) == (1, 1)


class _Singles(Points):
    def __init__(self) -> None:
        super().__init__("tuple")
        self.x = self.x.float()


# ---- refusals


def test_what_servers_cannot_do_is_said() -> None:
    check_servers(plan_of(2, 1))
    with pytest.raises(InputError, match="batch_norm is synchronized"):
        check_servers(plan_of(2, 1, numerics={"batch_norm": "synchronized"}))
    with pytest.raises(InputError, match="cuda_graphs"):
        check_servers(plan_of(1, 1, compute={"cuda_graphs": True}))
    asked = Question(subject=None, plan=plan_of(2, 1, gradients={"updates": "asynchronous"}))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="prove takes synchronous ones"):
        check_question(asked)


def test_a_session_of_ones_own_has_no_servers() -> None:
    recipe = tied_recipe()
    with pytest.raises(InputError, match="`meshwright train` starts"):
        Session(recipe.model, recipe.make_optimizer, loss=None, plan=plan_of(1, 1), world=ALONE)
