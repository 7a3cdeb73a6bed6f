"""Branches on different ranks: what each rank has, what they exchange (counted on two ranks, too), and the seconds."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from meshwright.cluster.names import cluster_from_name
from meshwright.errors import InputError
from meshwright.launch.world import World
from meshwright.plan import Plan
from meshwright.profile.optimizer import OptimizerCost, measure_optimizer_cost
from meshwright.profile.tracing.trace import trace_profile
from meshwright.profile.values import ModelProfile
from meshwright.simulator.memory.device_memory import CPU_MEMORY
from meshwright.simulator.memory.peak import predict_memory
from meshwright.simulator.step import StepTime, predict_step
from meshwright.simulator.tensor.branches import RankWork, branch_messages, branch_rank_profiles, synchronized_step_s
from meshwright.simulator.tensor.messages import TensorMessage
from meshwright.simulator.tensor.split_profile import split_profile
from meshwright.train.session import Session
from tests.proof.traffic.counter import bytes_by_collective, count_traffic, local_bytes
from tests.ranks import RankPool
from tests.simulator.traffic import exchanges
from tests.zoo import BATCH, ZOO, RandomSamples

ADAMW = OptimizerCost(state_ratio=2.0, temporary_ratio=0.0, multi_tensor=True)
WIDTH, FEATURES, LARGE, SMALL = 64, 256, 512, 32
TOWERS = {"large": 0, "small": 1}
HEADS = {"wide": 0, "narrow": 1}


class Towers(nn.Module):
    """Two of different sizes, and nothing that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Sequential(nn.Linear(FEATURES, LARGE), nn.ReLU(), nn.Linear(LARGE, WIDTH))
        self.small = nn.Sequential(nn.Linear(FEATURES, SMALL), nn.ReLU(), nn.Linear(SMALL, WIDTH))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return (self.large(one) * self.small(other)).sum(-1)


class Heads(nn.Module):
    """Two on one trunk, that give WIDTH and 1 number a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, FEATURES)
        self.down = nn.Linear(FEATURES, WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, LARGE), nn.ReLU(), nn.Linear(LARGE, WIDTH))
        self.narrow = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shared = self.down(torch.relu(self.up(x)))
        return self.wide(shared), self.narrow(shared)


def squares(output: Any, target: Tensor) -> Tensor:
    found = output if isinstance(output, tuple) else (output,)
    return sum((one.square().mean() for one in found), target.sum())


@cache
def traced(kind: str) -> ModelProfile:
    with torch.device("meta"):
        if kind == "towers":
            return trace_profile(
                Towers(),
                (torch.empty(2, FEATURES), torch.empty(2, FEATURES), torch.empty(2)),
                squares,
                with_structure=True,
            )
        return trace_profile(Heads(), (torch.empty(2, WIDTH), torch.empty(2)), squares, with_structure=True)


def plan_of(branches: dict[str, int], **groups: Any) -> Plan:
    axes = {"tensor": 2, **groups.pop("axes", {})}
    return Plan.model_validate({"axes": axes, **groups, "modules": {"branches": branches, **groups.pop("modules", {})}})


def step(kind: str, plan: Plan, batch: float = 64.0) -> StepTime:
    return predict_step(cluster_from_name("2x8xA100-80GB"), traced(kind), plan, batch, ADAMW)


# ---- what a rank has


def test_a_rank_has_what_is_shared_and_its_own_branches() -> None:
    large, small = branch_rank_profiles(traced("towers"), plan_of(TOWERS))
    assert {p.names[0].partition(".")[0] for p in large.parameters} == {"large"}
    assert small.parameter_count == FEATURES * SMALL + SMALL + SMALL * WIDTH + WIDTH
    # a product forward, and backward that of the weights; the gradient of the input only behind the first layer
    assert large.flops(4) == 2 * 4 * LARGE * (2 * FEATURES + 3 * WIDTH)
    assert large.flops(4) + small.flops(4) == traced("towers").flops(4)
    wide, narrow = branch_rank_profiles(traced("heads"), plan_of(HEADS))
    shared = {"up.weight", "up.bias", "down.weight", "down.bias"}
    assert {p.names[0] for p in narrow.parameters} == shared | {"narrow.weight", "narrow.bias"}
    assert shared < {p.names[0] for p in wide.parameters}
    without = [o.layer for s in narrow.segments for o in s.operators if o.layer.startswith("wide")]
    assert not without


def test_what_is_shared_is_split_as_without_branches_and_branches_are_not() -> None:
    wide, _ = (split_profile(own, plan_of(HEADS)) for own in branch_rank_profiles(traced("heads"), plan_of(HEADS)))
    shapes = {p.names[0]: p.shape for p in wide.parameters}
    assert shapes["up.weight"] == (FEATURES // 2, WIDTH)
    assert shapes["wide.0.weight"] == (LARGE, WIDTH)


def test_one_rank_or_no_branches_change_nothing() -> None:
    whole = traced("towers")
    assert branch_rank_profiles(whole, Plan.model_validate({"axes": {"tensor": 2}})) == (whole,)
    alone = Plan.model_validate({"modules": {"branches": {"large": 0, "small": 0}}})
    assert step("towers", alone) == step("towers", Plan())


def test_equal_heads_of_a_list_are_parted() -> None:
    class Alike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Linear(WIDTH, WIDTH)
            self.heads = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, LARGE), nn.Linear(LARGE, 4)) for _ in range(4))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            shared = self.trunk(x)
            return tuple(head(shared) for head in self.heads)

    with torch.device("meta"):
        found = trace_profile(Alike(), (torch.empty(2, WIDTH), torch.empty(2)), squares, with_structure=True)
    branches = {f"heads.{head}": int(head > 2) for head in range(4)}
    three, one = branch_rank_profiles(found, plan_of(branches))
    head, trunk = WIDTH * LARGE + LARGE + LARGE * 4 + 4, WIDTH * WIDTH + WIDTH
    assert (three.parameter_count, one.parameter_count) == (trunk + 3 * head, trunk + head)
    of_head = 2 * 3 * (WIDTH * LARGE + LARGE * 4)
    assert three.flops(1) - one.flops(1) == pytest.approx(2 * of_head)
    # forward and back, nothing stays
    for own in (three, one):
        left = sum(
            s.block_count * c.bytes.at(8) * c.tensor_count for s in own.segments for c in s.changes if c.role == "saved"
        )
        assert left == 0


def test_branches_that_are_not_there_and_pipelines_are_refused() -> None:
    with pytest.raises(InputError, match="the model has no module 'larg'"):
        step("towers", plan_of({"larg": 0}))
    cut = plan_of(TOWERS, axes={"pipeline": 2}, pipeline={"cuts": ["large"]})
    with pytest.raises(InputError, match=r"large lives on one rank of the tensor axis, which works without a pipeline"):
        step("towers", cut)


# ---- what ranks exchange


def test_results_are_broadcast_and_gradients_of_shared_inputs_summed_once() -> None:
    batch = 8
    assert branch_messages(traced("towers"), plan_of(TOWERS), batch) == [
        TensorMessage("broadcast", batch * WIDTH * 4, 1, True),
        TensorMessage("broadcast", batch * WIDTH * 4, 1, True),
    ]
    assert branch_messages(traced("heads"), plan_of(HEADS), batch) == [
        TensorMessage("broadcast", batch * WIDTH * 4, 1, True),
        TensorMessage("broadcast", batch * 4, 1, True),
        TensorMessage("all_reduce", batch * WIDTH * 4, 1, False),
    ]


COUNTED = {"two_tower": {"query": 0, "document": 1}, "multitask": {"classify": 0, "estimate": 1}}


def counted_plan(kind: str, axes: dict[str, int]) -> Plan:
    whole = {"encoder.0": {"kind": "none"}} if kind == "multitask" else {}
    return plan_of(COUNTED[kind], axes=axes, modules={"branches": COUNTED[kind], "splits": whole})


def count(rank: int, size: int, kind: str, plan: Plan) -> tuple[dict[Any, int], dict[str, int]]:
    torch.manual_seed(0)
    made, data = ZOO[kind], RandomSamples(ZOO[kind].data)
    session = Session(
        made.model(),
        lambda parameters: torch.optim.AdamW(parameters.values()),
        loss=made.loss,
        plan=plan,
        world=World(rank, rank, size, size, 0, torch.device("cpu"), None),
        sample=default_collate([data[0]] * 2),
    )
    batches = session.batches(data, 1, BATCH)
    session.step(next(batches))
    with count_traffic(session._parallel.mesh) as watched:
        session.step(next(batches))
    return bytes_by_collective(watched.collectives), local_bytes(session.module, session.optimizer)


@pytest.mark.parametrize("kind", COUNTED)
def test_two_ranks_exchange_and_hold_what_was_predicted(two: RankPool, kind: str) -> None:
    check_counted(two, kind, counted_plan(kind, {}))


@pytest.mark.soak
@pytest.mark.parametrize("kind", COUNTED)
@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_four_ranks_exchange_and_hold_what_was_predicted(four: RankPool, kind: str, axis: str) -> None:
    check_counted(four, kind, counted_plan(kind, {axis: 2}))


def check_counted(pool: RankPool, kind: str, plan: Plan) -> None:
    found = pool.run(count, kind, plan)
    data = RandomSamples(ZOO[kind].data)
    with torch.device("meta"):
        model = ZOO[kind].model()
    sample = default_collate([data[0], data[1]])
    whole = trace_profile(model, sample, ZOO[kind].loss, with_structure=True, on_gpu=False)
    stated: dict[Any, float] = {}
    for exchange in exchanges(whole, plan, BATCH / plan.shares):
        key = exchange.axis, exchange.collective
        stated[key] = stated.get(key, 0.0) + exchange.bytes * exchange.count
    counted = {key: max(one.get(key, 0) for one, _ in found) for one, _ in found for key in one}
    assert counted == pytest.approx(stated)
    adam = measure_optimizer_cost(lambda parameters: torch.optim.AdamW(parameters), multi_tensor=False)
    parts = predict_memory(whole, plan, BATCH // plan.shares, adam, CPU_MEMORY).breakdown
    weights = max(held["weights"] for _, held in found)
    assert parts["weights"] == pytest.approx(weights, rel=0.05)  # rows that shards do not divide


# ---- seconds


def test_ranks_meet_where_results_are_used_and_where_gradients_are_summed() -> None:
    ranks = [RankWork(forward_s=1.0, backward_s=5.0, end_s=1.0), RankWork(forward_s=3.0, backward_s=2.0, end_s=6.0)]
    assert synchronized_step_s(ranks, 1, summed=False) == 3 + max(5 + 1, 2 + 6)
    assert synchronized_step_s(ranks, 1, summed=True) == 3 + 5 + 6
    assert synchronized_step_s(ranks, 3, summed=False) == 3 + 2 * 6 + 8
    assert synchronized_step_s(ranks, 3, summed=True) == 3 * (3 + 5) + 6
    assert (
        synchronized_step_s(ranks[:1], 3, summed=True)
        == 3 * (ranks[0].forward_s + ranks[0].backward_s) + ranks[0].end_s
    )


@pytest.mark.parametrize("kind", ["towers", "heads"])
@pytest.mark.parametrize("axes", [{}, {"replicate": 4}, {"shard": 4}], ids=str)
def test_the_breakdown_adds_up_to_the_step(kind: str, axes: dict[str, int]) -> None:
    branches = TOWERS if kind == "towers" else HEADS
    found = step(kind, plan_of(branches, axes=axes, memory={"accumulation": 2}))
    assert sum(found.breakdown.values()) == pytest.approx(found.step_s)
    assert min(found.breakdown.values()) >= 0
    assert found.breakdown["tensor"] > 0


def test_the_slowest_rank_makes_the_step() -> None:
    batch = 2.0**20  # computing takes longer than starting operators
    apart, together = step("towers", plan_of(TOWERS), batch), step("towers", plan_of({"large": 0, "small": 0}), batch)
    without = step("towers", Plan(), batch)
    assert apart.step_s < together.step_s
    assert together.breakdown["compute"] == pytest.approx(without.breakdown["compute"])
    large = branch_rank_profiles(traced("towers"), plan_of(TOWERS))[0]
    alone = predict_step(cluster_from_name("8xA100-80GB"), large, Plan(), batch, ADAMW)
    assert apart.breakdown["compute"] == pytest.approx(alone.breakdown["compute"])


def test_gradients_of_a_branch_are_combined_only_where_it_lives() -> None:
    axes = {"replicate": 8}
    apart = exchanges(traced("towers"), plan_of(TOWERS, axes=axes), 8)
    combined = sum(e.bytes * e.count for e in apart if e.axis == "replicate")
    large = branch_rank_profiles(traced("towers"), plan_of(TOWERS))[0]
    assert combined == large.parameter_bytes + 4 * len(large.parameters)  # and whether each is used


def test_the_rank_with_most_decides_how_much_memory_is_needed() -> None:
    whole = traced("towers")
    large, small = branch_rank_profiles(whole, plan_of(TOWERS))
    parts = predict_memory(whole, plan_of(TOWERS), 8, ADAMW, CPU_MEMORY).breakdown
    assert parts["weights"] == large.parameter_bytes
    assert parts["optimizer state"] == 2 * large.parameter_bytes
    assert small.parameter_bytes < large.parameter_bytes
