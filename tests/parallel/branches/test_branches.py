"""Branches on different ranks train the same model, hold only their own weights, and run at the same time."""

import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from meshwright.batch import split
from meshwright.errors import InputError
from meshwright.launch.place import Place
from meshwright.launch.world import World
from meshwright.parallel.apply import apply
from meshwright.parallel.branches.branches import Elsewhere
from meshwright.parallel.branches.pending import Pending
from meshwright.parallel.check import check_plan
from meshwright.plan import Plan
from meshwright.proof.prove import prove_in
from meshwright.proof.question import OwnModel, Question
from meshwright.proof.record.record import make_session
from meshwright.proof.reference.setting import Setting, computing_in, set_up
from meshwright.train.session import Session
from tests.ranks import RankPool
from tests.soaked import all_but
from tests.zoo import BATCH, SAMPLES, ZOO, Made, MultiTask, TwoTowers

BRANCHES = {"two_tower": {"query": 0, "document": 1}, "multitask": {"classify": 0, "estimate": 1}}
TOLERANCE = 1e-9
CLIP = 0.05


def plan_of(kind: str, axes: dict[str, int], memory: dict[str, Any] | None = None) -> Plan:
    chosen = {"axes": {"tensor": 2, **axes}, "modules": {"branches": BRANCHES[kind]}, "memory": memory or {}}
    return Plan.model_validate(chosen)


def asked(kind: str, plan: Plan) -> Question:
    torch.manual_seed(0)
    made = ZOO[kind]
    model = made.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    return Question(OwnModel(model, optimizer, made.loss, Made(made.data), BATCH, clip_norm=CLIP, seed=3), plan)


def world_of(rank: int, size: int) -> World:
    return World(rank, rank, size, size, 0, torch.device("cpu"), None)


def in_dtype(setting: Setting) -> list[Any]:
    def cast(value: Any) -> Any:
        return value.to(setting.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return [tree_map(cast, setting.data[index]) for index in range(SAMPLES)]


def session_of(kind: str, plan: Plan, rank: int, size: int) -> tuple[Session, Setting]:
    question = asked(kind, plan)
    setting = set_up(question)
    return make_session(setting, question, world_of(rank, size), Place.nowhere()), setting


# ---- the same model


def prove(rank: int, size: int, kind: str, plan: Plan, folder: Path) -> dict[str, Any]:
    """The proof on rank 0; on all, the evaluation, the weights, and the names of what the rank holds."""
    proof = prove_in(asked(kind, plan), world_of(rank, size), folder)
    session, setting = session_of(kind, plan, rank, size)
    with computing_in(setting.dtype):
        session.step(next(session.batches(in_dtype(setting), 1, BATCH)))
        evaluated = session.evaluate(in_dtype(setting), batch=10)
        state = session.state_dict()
    return {
        "proof": proof.to_dict() if proof else None,
        "evaluated": evaluated,
        "state": state,
        "held": [name for name, _ in session.module.named_parameters()],
    }


def alone(kind: str, state: dict[str, Tensor]) -> float:
    """The loss over all samples, of the untouched model with these weights."""
    setting = set_up(asked(kind, Plan()))
    setting.model.load_state_dict(state)
    setting.model.eval()
    data = default_collate(in_dtype(setting))
    with torch.no_grad(), computing_in(setting.dtype):
        assert setting.loss is not None
        return float(setting.loss(setting.model(*data[:-1]), data[-1]))


def check_proved(pool: RankPool, kind: str, plan: Plan, folder: Path) -> None:
    found = pool.run(prove, kind, plan, folder)
    proof = found[0]["proof"]
    assert proof["equal"], proof["first_difference"]
    assert proof["max_relative_error"] <= TOLERANCE
    assert proof["steps"] == 3
    names = [name for name, _ in ZOO[kind].model().named_parameters()]
    for rank, one in enumerate(found):
        assert one["evaluated"]["loss"] == pytest.approx(alone(kind, one["state"]), rel=TOLERANCE)
        gone = [f"{branch}." for branch, home in BRANCHES[kind].items() if home != rank % 2]
        assert one["held"] == [name for name in names if not name.startswith(tuple(gone))]


@pytest.mark.parametrize("kind", BRANCHES)
def test_branches_train_the_same_model(two: RankPool, kind: str, tmp_path: Path) -> None:
    check_proved(two, kind, plan_of(kind, {}), tmp_path)


@pytest.mark.parametrize("kind", BRANCHES)
@pytest.mark.parametrize("axis", all_but(["replicate"], ["replicate", "shard"]))
def test_beside_other_axes_and_with_accumulation(four: RankPool, kind: str, axis: str, tmp_path: Path) -> None:
    check_proved(four, kind, plan_of(kind, {axis: 2}, {"accumulation": 2}), tmp_path)


@pytest.mark.soak
def test_towers_are_computed_again(two: RankPool, tmp_path: Path) -> None:
    check_proved(two, "two_tower", plan_of("two_tower", {}, {"recompute": "full"}), tmp_path)


# ---- checkpoints


def save(rank: int, size: int, kind: str, plan: Plan, path: Path) -> dict[str, Tensor]:
    session, setting = session_of(kind, plan, rank, size)
    with computing_in(setting.dtype):
        session.step(next(session.batches(in_dtype(setting), 1, BATCH)))
    session.save(path)
    return go_on(session, setting)


def load(rank: int, size: int, kind: str, plan: Plan, path: Path) -> dict[str, Tensor]:
    session, setting = session_of(kind, plan, rank, size)
    session.load(path)
    return go_on(session, setting)


def go_on(session: Session, setting: Setting) -> dict[str, Tensor]:
    with computing_in(setting.dtype):
        session.step(next(session.batches(in_dtype(setting), 1, BATCH)))
        return session.state_dict()


@pytest.mark.soak
@pytest.mark.parametrize("kind", BRANCHES)
def test_checkpoints_go_to_and_come_from_other_plans(two: RankPool, kind: str, tmp_path: Path) -> None:
    apart = plan_of(kind, {})
    saved = two.run(save, kind, apart, tmp_path / "apart")
    expected = save(0, 1, kind, Plan(), tmp_path / "alone")
    found = [
        *saved,
        load(0, 1, kind, Plan(), tmp_path / "apart"),
        *two.run(load, kind, apart, tmp_path / "alone"),
        *two.run(load, kind, apart, tmp_path / "apart"),
    ]
    for state in found:
        assert list(state) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12, msg=name)


# ---- at the same time


class Meet(torch.autograd.Function):
    """Goes on, forward and backward, when all ranks are here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        dist.barrier(group)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dist.barrier(ctx.group)
        return grads[0], None


def meet(module: nn.Module, group: dist.ProcessGroup) -> None:
    module.register_forward_hook(
        lambda _, __, output: None if isinstance(output, FakeTensor) else Meet.apply(output, group)
    )


def run_together(rank: int, size: int, kind: str) -> tuple[str, float]:
    """Every branch waits in its middle for the other ranks' to get there, in both passes."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    model, data = ZOO[kind].model(), default_collate([Made(ZOO[kind].data)[i] for i in range(4)])
    parallel = apply(plan_of(kind, {}), model, torch.device("cpu"), size, data)
    mine = next(name for name, home in BRANCHES[kind].items() if home == rank)
    first = parallel.module.get_submodule(mine)
    meet(next(m for m in first.modules() if isinstance(m, nn.Linear)), group)
    kinds = []
    if rank:
        stub = parallel.module.get_submodule(next(iter(BRANCHES[kind])))
        assert isinstance(stub, Elsewhere)
        stub.register_forward_hook(
            lambda _, __, output: kinds.append((type(output), output.delivery.work.is_completed()))
        )
    loss = ZOO[kind].loss(parallel.module(*data[:-1]), data[-1])
    loss.backward()
    return str(kinds), float(loss)


@pytest.mark.parametrize("kind", BRANCHES)
def test_branches_run_at_the_same_time(two: RankPool, kind: str) -> None:
    (_, here), (kinds, there) = two.run(run_together, kind)
    assert here == there
    assert kinds == str([(Pending, False)]), "rank 1 went on before rank 0 had a result"


# ---- structures, chance, and a rank that holds nothing


class Pair(nn.Module):
    """Returns a structure, draws, keeps statistics, and is followed by a part that all ranks run."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        out = self.norm(self.linear(x)) * scale
        return {"kept": self.drop(out), "seen": (out.detach().argmax(1), None), "even": out.t()}


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.2))
        self.left, self.right = Pair(), Pair()
        self.last = nn.Sequential(nn.ReLU(True), nn.Dropout(0.2), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        shared = self.trunk(x)
        left, right = self.left(shared, scale=2.0), self.right(shared)
        left["kept"] += 1  # in place
        index = (left["seen"][0] + right["seen"][0]).remainder(4)
        picked = right["even"].t().gather(1, index[:, None])
        out: Tensor = self.last(left["kept"] + right["kept"] * picked + shared)
        return out


def odd_step(rank: int, size: int, branches: dict[str, int], training: bool) -> dict[str, Any]:
    torch.manual_seed(5)
    model = Odd().double()
    x = torch.randn(8, 4, dtype=torch.float64)
    plan = Plan.model_validate(
        {"axes": {"tensor": size}, "modules": {"branches": branches, "splits": {"*.0": {"kind": "none"}}}}
    )
    parallel = apply(plan, model, torch.device("cpu"), size, (x, torch.zeros(8)))
    optimizer = torch.optim.SGD([{"params": list(parallel.parameters().values())}], lr=0.1)
    parallel.train(training)
    torch.manual_seed(7)
    out = parallel.module(x)
    out.square().sum().backward()
    norm = parallel.clip_(math.inf)  # which clips nothing
    gradients = parallel.full_gradients()
    optimizer.step()
    return {"out": out.detach(), "gradients": gradients, "norm": norm, "state": parallel.full_state()}


def same(left: Any, right: Any) -> bool:
    return all(torch.equal(left[key], right[key]) for key in left) and left.keys() == right.keys()


@pytest.mark.soak
@pytest.mark.parametrize("branches", [{"left": 0, "right": 1}, {"right": 1, "left": 1}])
def test_structures_and_chance_are_the_same_on_all_ranks(two: RankPool, branches: dict[str, int]) -> None:
    here, there = two.run(odd_step, branches, True)
    for key in ("gradients", "state"):
        assert same(here[key], there[key])
    assert torch.equal(here["out"], there["out"])
    assert here["norm"] == there["norm"]
    assert list(here["state"]) == list(Odd().state_dict())


def test_without_chance_they_are_those_of_the_untouched_model(two: RankPool) -> None:
    torch.manual_seed(5)
    model = Odd().double().eval()
    out = model(torch.randn(8, 4, dtype=torch.float64))
    out.square().sum().backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    norm = torch.stack([g.square().sum() for g in wanted.values() if g is not None]).sum().sqrt()
    for found in two.run(odd_step, {"left": 0, "right": 1}, False):
        torch.testing.assert_close(found["out"], out.detach())
        torch.testing.assert_close(found["norm"], norm)
        for name, gradient in wanted.items():
            torch.testing.assert_close(found["gradients"][name], gradient, msg=name)


def all_on_one(rank: int, size: int) -> tuple[int, list[str]]:
    """Two steps of two towers on rank 1: rank 0 trains nothing."""
    plan = Plan.model_validate({"axes": {"tensor": 2}, "modules": {"branches": {"query": 1, "document": 1}}})
    session, setting = session_of("two_tower", plan, rank, size)
    batches = session.batches(in_dtype(setting), 1, BATCH)
    with computing_in(setting.dtype):
        session.step(next(batches))
        session.step(next(batches))
        return len(list(session.module.parameters())), list(session.state_dict())


def test_a_rank_may_hold_nothing_to_train(two: RankPool) -> None:
    names = list(TwoTowers().state_dict())
    assert two.run(all_on_one) == [(0, names), (len(names), names)]


# ---- one behind the other


class Doubled(torch.autograd.Function):
    """A user's own, which torch's function protocol does not see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.side = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = Doubled.apply(self.second(first))
        third: Tensor = self.third(second)
        return Doubled.apply(third) + Doubled.apply(self.side(first))


def chain_step(rank: int, size: int, precision: str) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(5)
    model = Chain()
    x = torch.randn(8, 4)
    plan = Plan.model_validate(
        {
            "axes": {"tensor": size},
            "modules": {"branches": {"first": 0, "second": 1, "third": 0}, "splits": {"side": {"kind": "column"}}},
            "numerics": {"precision": precision},
        }
    )
    parallel = apply(plan, model, torch.device("cpu"), size, (x, torch.zeros(8)))
    found: list[Tensor] = []

    def loss_of(_: int, output: Tensor) -> Tensor:
        found.append(output.detach())
        return output.square().sum()

    parallel.run([(split((x, x)), 8)], loss_of)
    return found[0], parallel.full_gradients()


@pytest.mark.soak
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.05)])
def test_branches_may_need_each_other(two: RankPool, precision: str, tolerance: float) -> None:
    torch.manual_seed(5)
    model = Chain()
    out = model(torch.randn(8, 4))
    out.square().sum().backward()
    here, there = two.run(chain_step, precision)
    assert torch.equal(here[0], there[0])
    for found in (here, there):
        torch.testing.assert_close(found[0], out.detach(), rtol=tolerance, atol=tolerance)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            scale = float(parameter.grad.abs().max())
            torch.testing.assert_close(found[1][name] / scale, parameter.grad / scale, rtol=0, atol=tolerance, msg=name)


# ---- what is refused


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.tower(a) * self.tower(b)).sum(-1) + self.other(a).sum(-1)


class Reads(nn.Module):
    """A branch that finds the trunk's result by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(4, 4), Twice()
        self.side = nn.Linear(4, 4)
        self.head.forward = self.look  # type: ignore[assignment]

    def look(self, x: Tensor) -> Tensor:
        out: Tensor = self.head.tower(self.seen) + x
        return out

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.trunk(x)
        out: Tensor = self.head(x) + self.side(self.seen)
        return out


class Overwrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.a = nn.Sequential(nn.ReLU(True), nn.Linear(4, 4))
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        out: Tensor = self.a(x) + self.b(x)
        return out


def tied() -> nn.Module:
    model = TwoTowers()
    model.document.words.weight = model.query.words.weight
    return model


TOKENS = (torch.ones(2, 6, dtype=torch.long), torch.ones(2, 6, dtype=torch.long), torch.ones(2))
NUMBERS = (torch.ones(2, 4), torch.ones(2, 4), torch.ones(2))


@pytest.mark.parametrize(
    ("model", "sample", "branches", "more", "words"),
    [
        (TwoTowers, TOKENS, {"querry": 0}, {}, "has no module 'querry': did you mean 'query'?"),
        (TwoTowers, TOKENS, {"query": 0, "query.words": 1}, {}, "branches.query.words: it lies in query"),
        (tied, TOKENS, {"query": 0, "document": 1}, {}, "query.words.weight is tied to document.words.weight"),
        (Twice, NUMBERS, {"tower": 0}, {}, "branches.tower: it is called 2 times in a forward pass"),
        (Reads, NUMBERS[1:], {"head": 0}, {}, "head.tower uses (t) a result from outside|uses (addmm) a result"),
        (Reads, NUMBERS[1:], {"head.other": 0}, {}, "branches.head.other: it is never called"),
        (Overwrites, NUMBERS[1:], {"a": 0, "b": 1}, {}, "a.0 overwrites in place (relu_) what the branch is given"),
        (
            MultiTask,
            (torch.ones(2, 12), torch.ones(2)),
            {"classify": 0},
            {"modules": {"splits": {"classify.0": {"kind": "column"}}}},
            "plan.modules.splits divides classify.0 among several",
        ),
        (
            TwoTowers,
            TOKENS,
            {"query": 0},
            {"axes": {"pipeline": 2}, "pipeline": {"cuts": ["query"]}},
            "leave out the branches, or set axes.pipeline to 1",
        ),
        (TwoTowers, TOKENS, {"query.words": 0}, {"memory": {"recompute": "full"}}, "lies in query, which plan.memory"),
    ],
)
def test_what_cannot_be_apart_is_told(
    model: Any, sample: Any, branches: dict[str, int], more: dict[str, Any], words: str
) -> None:
    chosen: dict[str, Any] = {"axes": {"tensor": 2}, "modules": {"branches": branches}}
    for group, fields in more.items():
        chosen.setdefault(group, {}).update(fields)
    with pytest.raises(InputError) as told:
        check_plan(Plan.model_validate(chosen), model(), sample)
    assert any(word in str(told.value) for word in words.split("|"))
