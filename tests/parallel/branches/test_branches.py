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

from meshwright.batch import split_batch
from meshwright.errors import InputError
from meshwright.launch.heartbeat import Heartbeat
from meshwright.launch.world import World
from meshwright.parallel.apply import apply
from meshwright.parallel.branches.branches import RemoteBranch
from meshwright.parallel.branches.pending import PendingTensor
from meshwright.parallel.check import check_plan
from meshwright.plan import Plan
from meshwright.proof.prove import prove_in_running_ranks
from meshwright.proof.record.record import make_session
from meshwright.proof.reference.reference_setup import ReferenceSetup, build_setup, default_dtype
from meshwright.proof.request import ProofRequest, UserModel
from meshwright.train.session import Session
from tests.ranks import RankPool
from tests.soaked import all_but
from tests.zoo import BATCH, SAMPLES, ZOO, MultiTask, RandomSamples, TwoTowers

BRANCHES = {"two_tower": {"query": 0, "document": 1}, "multitask": {"classify": 0, "estimate": 1}}
TOLERANCE = 1e-9
CLIP = 0.05


def plan_of(kind: str, axes: dict[str, int], memory: dict[str, Any] | None = None) -> Plan:
    fields = {"axes": {"tensor": 2, **axes}, "modules": {"branches": BRANCHES[kind]}, "memory": memory or {}}
    return Plan.model_validate(fields)


def proof_request(kind: str, plan: Plan) -> ProofRequest:
    torch.manual_seed(0)
    entry = ZOO[kind]
    model = entry.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    user_model = UserModel(model, optimizer, entry.loss, RandomSamples(entry.data), BATCH, clip_norm=CLIP, seed=3)
    return ProofRequest(user_model, plan)


def world_of(rank: int, size: int) -> World:
    return World(rank, rank, size, size, 0, torch.device("cpu"), None)


def in_dtype(setup: ReferenceSetup) -> list[Any]:
    def cast(value: Any) -> Any:
        return value.to(setup.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return [tree_map(cast, setup.data[index]) for index in range(SAMPLES)]


def session_of(kind: str, plan: Plan, rank: int, size: int) -> tuple[Session, ReferenceSetup]:
    request = proof_request(kind, plan)
    setup = build_setup(request)
    return make_session(setup, request, world_of(rank, size), Heartbeat.in_memory()), setup


# ---- the same model


def prove(rank: int, size: int, kind: str, plan: Plan, folder: Path) -> dict[str, Any]:
    """The proof on rank 0; on all ranks the evaluation, the weights, and the names of the rank's parameters."""
    proof = prove_in_running_ranks(proof_request(kind, plan), world_of(rank, size), folder)
    session, setup = session_of(kind, plan, rank, size)
    with default_dtype(setup.dtype):
        session.step(next(session.batches(in_dtype(setup), 1, BATCH)))
        evaluated = session.evaluate(in_dtype(setup), batch=10)
        state = session.state_dict()
    return {
        "proof": proof.to_dict() if proof else None,
        "evaluated": evaluated,
        "state": state,
        "parameters": [name for name, _ in session.module.named_parameters()],
    }


def loss_on_one_process(kind: str, state: dict[str, Tensor]) -> float:
    """The loss of the unchanged model with these weights over all samples."""
    setup = build_setup(proof_request(kind, Plan()))
    setup.model.load_state_dict(state)
    setup.model.eval()
    data = default_collate(in_dtype(setup))
    with torch.no_grad(), default_dtype(setup.dtype):
        assert setup.loss is not None
        return float(setup.loss(setup.model(*data[:-1]), data[-1]))


def check_proved(pool: RankPool, kind: str, plan: Plan, folder: Path) -> None:
    results = pool.run(prove, kind, plan, folder)
    proof = results[0]["proof"]
    assert proof["equal"], proof["first_difference"]
    assert proof["max_relative_error"] <= TOLERANCE
    assert proof["steps"] == 3
    names = [name for name, _ in ZOO[kind].model().named_parameters()]
    for rank, result in enumerate(results):
        assert result["evaluated"]["loss"] == pytest.approx(loss_on_one_process(kind, result["state"]), rel=TOLERANCE)
        remote = [f"{branch}." for branch, owner in BRANCHES[kind].items() if owner != rank % 2]
        assert result["parameters"] == [name for name in names if not name.startswith(tuple(remote))]


@pytest.mark.parametrize("kind", BRANCHES)
def test_branches_train_the_same_model(two: RankPool, kind: str, tmp_path: Path) -> None:
    check_proved(two, kind, plan_of(kind, {}), tmp_path)


@pytest.mark.parametrize("kind", BRANCHES)
@pytest.mark.parametrize("axis", all_but(["replicate"], ["replicate", "shard"]))
def test_with_other_axes_and_accumulation(four: RankPool, kind: str, axis: str, tmp_path: Path) -> None:
    check_proved(four, kind, plan_of(kind, {axis: 2}, {"accumulation": 2}), tmp_path)


@pytest.mark.soak
def test_towers_are_recomputed(two: RankPool, tmp_path: Path) -> None:
    check_proved(two, "two_tower", plan_of("two_tower", {}, {"recompute": "full"}), tmp_path)


# ---- checkpoints


def save(rank: int, size: int, kind: str, plan: Plan, path: Path) -> dict[str, Tensor]:
    session, setup = session_of(kind, plan, rank, size)
    with default_dtype(setup.dtype):
        session.step(next(session.batches(in_dtype(setup), 1, BATCH)))
    session.save(path)
    return step_and_state(session, setup)


def load(rank: int, size: int, kind: str, plan: Plan, path: Path) -> dict[str, Tensor]:
    session, setup = session_of(kind, plan, rank, size)
    session.load(path)
    return step_and_state(session, setup)


def step_and_state(session: Session, setup: ReferenceSetup) -> dict[str, Tensor]:
    with default_dtype(setup.dtype):
        session.step(next(session.batches(in_dtype(setup), 1, BATCH)))
        return session.state_dict()


@pytest.mark.soak
@pytest.mark.parametrize("kind", BRANCHES)
def test_checkpoints_move_between_plans(two: RankPool, kind: str, tmp_path: Path) -> None:
    with_branches = plan_of(kind, {})
    saved = two.run(save, kind, with_branches, tmp_path / "branches")
    expected = save(0, 1, kind, Plan(), tmp_path / "one_process")
    states = [
        *saved,
        load(0, 1, kind, Plan(), tmp_path / "branches"),
        *two.run(load, kind, with_branches, tmp_path / "one_process"),
        *two.run(load, kind, with_branches, tmp_path / "branches"),
    ]
    for state in states:
        assert list(state) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12, msg=name)


# ---- at the same time


class Barrier(torch.autograd.Function):
    """Waits, in the forward and in the backward pass, until all ranks have arrived."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        dist.barrier(group)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dist.barrier(ctx.group)
        return grads[0], None


def add_barrier(module: nn.Module, group: dist.ProcessGroup) -> None:
    module.register_forward_hook(
        lambda _, __, output: None if isinstance(output, FakeTensor) else Barrier.apply(output, group)
    )


def run_together(rank: int, size: int, kind: str) -> tuple[str, float]:
    """Every branch waits in its middle until the branch of the other rank gets there, in both passes."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    model, data = ZOO[kind].model(), default_collate([RandomSamples(ZOO[kind].data)[i] for i in range(4)])
    parallel = apply(plan_of(kind, {}), model, torch.device("cpu"), size, data)
    own_name = next(name for name, owner in BRANCHES[kind].items() if owner == rank)
    own_branch = parallel.module.get_submodule(own_name)
    add_barrier(next(m for m in own_branch.modules() if isinstance(m, nn.Linear)), group)
    received = []
    if rank:
        remote = parallel.module.get_submodule(next(iter(BRANCHES[kind])))
        assert isinstance(remote, RemoteBranch)
        remote.register_forward_hook(
            lambda _, __, output: received.append((type(output), output.broadcast.work.is_completed()))
        )
    loss = ZOO[kind].loss(parallel.module(*data[:-1]), data[-1])
    loss.backward()
    return str(received), float(loss)


@pytest.mark.parametrize("kind", BRANCHES)
def test_branches_run_at_the_same_time(two: RankPool, kind: str) -> None:
    (_, loss_0), (received, loss_1) = two.run(run_together, kind)
    assert loss_0 == loss_1
    assert received == str([(PendingTensor, False)]), "rank 1 goes on before rank 0 has a result"


# ---- nested outputs, random numbers, and a rank without parameters


class DictBranch(nn.Module):
    """Returns a dict, uses random numbers and keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        out = self.norm(self.linear(x)) * scale
        return {"dropped": self.drop(out), "argmax": (out.detach().argmax(1), None), "transposed": out.t()}


class TwoDictBranches(nn.Module):
    """Two branches, followed by layers that all ranks run."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.2))
        self.left, self.right = DictBranch(), DictBranch()
        self.last = nn.Sequential(nn.ReLU(True), nn.Dropout(0.2), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        shared = self.trunk(x)
        left, right = self.left(shared, scale=2.0), self.right(shared)
        left["dropped"] += 1  # in place
        index = (left["argmax"][0] + right["argmax"][0]).remainder(4)
        picked = right["transposed"].t().gather(1, index[:, None])
        out: Tensor = self.last(left["dropped"] + right["dropped"] * picked + shared)
        return out


def step_with_dict_branches(rank: int, size: int, branches: dict[str, int], training: bool) -> dict[str, Any]:
    torch.manual_seed(5)
    model = TwoDictBranches().double()
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
    norm = parallel.clip_(math.inf)  # clips nothing
    gradients = parallel.full_gradients()
    optimizer.step()
    return {"out": out.detach(), "gradients": gradients, "norm": norm, "state": parallel.full_state()}


def are_equal(left: Any, right: Any) -> bool:
    return all(torch.equal(left[key], right[key]) for key in left) and left.keys() == right.keys()


@pytest.mark.soak
@pytest.mark.parametrize("branches", [{"left": 0, "right": 1}, {"right": 1, "left": 1}])
def test_nested_outputs_and_random_numbers_are_the_same_on_all_ranks(two: RankPool, branches: dict[str, int]) -> None:
    first, second = two.run(step_with_dict_branches, branches, True)
    for key in ("gradients", "state"):
        assert are_equal(first[key], second[key])
    assert torch.equal(first["out"], second["out"])
    assert first["norm"] == second["norm"]
    assert list(first["state"]) == list(TwoDictBranches().state_dict())


def test_without_random_numbers_they_are_those_of_the_unchanged_model(two: RankPool) -> None:
    torch.manual_seed(5)
    model = TwoDictBranches().double().eval()
    out = model(torch.randn(8, 4, dtype=torch.float64))
    out.square().sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    norm = torch.stack([g.square().sum() for g in expected.values() if g is not None]).sum().sqrt()
    for result in two.run(step_with_dict_branches, {"left": 0, "right": 1}, False):
        torch.testing.assert_close(result["out"], out.detach())
        torch.testing.assert_close(result["norm"], norm)
        for name, gradient in expected.items():
            torch.testing.assert_close(result["gradients"][name], gradient, msg=name)


def all_branches_on_rank_1(rank: int, size: int) -> tuple[int, list[str]]:
    """Two steps of two towers, both on rank 1: rank 0 trains nothing."""
    plan = Plan.model_validate({"axes": {"tensor": 2}, "modules": {"branches": {"query": 1, "document": 1}}})
    session, setup = session_of("two_tower", plan, rank, size)
    batches = session.batches(in_dtype(setup), 1, BATCH)
    with default_dtype(setup.dtype):
        session.step(next(batches))
        session.step(next(batches))
        return len(list(session.module.parameters())), list(session.state_dict())


def test_a_rank_may_have_no_parameters(two: RankPool) -> None:
    names = list(TwoTowers().state_dict())
    assert two.run(all_branches_on_rank_1) == [(0, names), (len(names), names)]


# ---- branches that depend on each other


class Double(torch.autograd.Function):
    """A user's autograd function, which does not pass through `__torch_function__`."""

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
        second = Double.apply(self.second(first))
        third: Tensor = self.third(second)
        return Double.apply(third) + Double.apply(self.side(first))


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
    outputs: list[Tensor] = []

    def loss_of(_: int, output: Tensor) -> Tensor:
        outputs.append(output.detach())
        return output.square().sum()

    parallel.run_microbatches([(split_batch((x, x)), 8)], loss_of)
    return outputs[0], parallel.full_gradients()


@pytest.mark.soak
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.05)])
def test_branches_may_depend_on_each_other(two: RankPool, precision: str, tolerance: float) -> None:
    torch.manual_seed(5)
    model = Chain()
    out = model(torch.randn(8, 4))
    out.square().sum().backward()
    results = two.run(chain_step, precision)
    assert torch.equal(results[0][0], results[1][0])
    for output, gradients in results:
        torch.testing.assert_close(output, out.detach(), rtol=tolerance, atol=tolerance)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            scale = float(parameter.grad.abs().max())
            torch.testing.assert_close(
                gradients[name] / scale, parameter.grad / scale, rtol=0, atol=tolerance, msg=name
            )


# ---- branches that are refused


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.tower(a) * self.tower(b)).sum(-1) + self.other(a).sum(-1)


class ReadsAttribute(nn.Module):
    """Its branch reads the trunk's result from an attribute instead of an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(4, 4), CalledTwice()
        self.side = nn.Linear(4, 4)
        self.head.forward = self.head_forward  # type: ignore[assignment]

    def head_forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head.tower(self.trunk_output) + x
        return out

    def forward(self, x: Tensor) -> Tensor:
        self.trunk_output = self.trunk(x)
        out: Tensor = self.head(x) + self.side(self.trunk_output)
        return out


class OverwritesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.a = nn.Sequential(nn.ReLU(True), nn.Linear(4, 4))
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        out: Tensor = self.a(x) + self.b(x)
        return out


def tied_towers() -> nn.Module:
    model = TwoTowers()
    model.document.words.weight = model.query.words.weight
    return model


TOKENS = (torch.ones(2, 6, dtype=torch.long), torch.ones(2, 6, dtype=torch.long), torch.ones(2))
NUMBERS = (torch.ones(2, 4), torch.ones(2, 4), torch.ones(2))


@pytest.mark.parametrize(
    ("model", "sample", "branches", "more_fields", "messages"),
    [
        (TwoTowers, TOKENS, {"querry": 0}, {}, "has no module 'querry': did you mean 'query'?"),
        (TwoTowers, TOKENS, {"query": 0, "query.words": 1}, {}, "branches.query.words: it lies in query"),
        (tied_towers, TOKENS, {"query": 0, "document": 1}, {}, "query.words.weight is tied to document.words.weight"),
        (CalledTwice, NUMBERS, {"tower": 0}, {}, "branches.tower: it is called 2 times in a forward pass"),
        (
            ReadsAttribute,
            NUMBERS[1:],
            {"head": 0},
            {},
            "uses (t) a result from outside|uses (addmm) a result",
        ),
        (ReadsAttribute, NUMBERS[1:], {"head.other": 0}, {}, "branches.head.other: it is never called"),
        (
            OverwritesInput,
            NUMBERS[1:],
            {"a": 0, "b": 1},
            {},
            "a.0 overwrites in place (relu_) what the branch",
        ),
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
def test_branches_that_cannot_run_alone_are_refused(
    model: Any, sample: Any, branches: dict[str, int], more_fields: dict[str, Any], messages: str
) -> None:
    fields: dict[str, Any] = {"axes": {"tensor": 2}, "modules": {"branches": branches}}
    for group, group_fields in more_fields.items():
        fields.setdefault(group, {}).update(group_fields)
    with pytest.raises(InputError) as raised:
        check_plan(Plan.model_validate(fields), model(), sample)
    assert any(message in str(raised.value) for message in messages.split("|"))
