"""Branches on different ranks: the profile of each rank, the bytes that ranks exchange, which are also counted in a run
on two ranks, and the step time."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from meshwright.cluster.names import cluster_from_name
from meshwright.errors import InputError
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
from meshwright.simulator.traffic import exchanges
from meshwright.train.session import Session
from tests.proof.traffic.counter import bytes_by_collective, count_traffic, local_bytes
from tests.ranks import RankPool
from tests.train.one_process import world
from tests.zoo import BATCH, ZOO, RandomSamples

ADAMW = OptimizerCost(state_ratio=2.0, temporary_ratio=0.0, multi_tensor=True)
WIDTH, FEATURES, LARGE, SMALL = 64, 256, 512, 32
TOWERS = {"large": 0, "small": 1}
HEADS = {"wide": 0, "narrow": 1}


class Towers(nn.Module):
    """Two towers of different sizes, which share no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Sequential(nn.Linear(FEATURES, LARGE), nn.ReLU(), nn.Linear(LARGE, WIDTH))
        self.small = nn.Sequential(nn.Linear(FEATURES, SMALL), nn.ReLU(), nn.Linear(SMALL, WIDTH))

    def forward(self, query: Tensor, document: Tensor) -> Tensor:
        return (self.large(query) * self.small(document)).sum(-1)


class Heads(nn.Module):
    """Two heads on one trunk, with WIDTH outputs and one output per sample."""

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
    outputs = output if isinstance(output, tuple) else (output,)
    return sum((tensor.square().mean() for tensor in outputs), target.sum())


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


def test_a_rank_has_the_shared_layers_and_its_branches() -> None:
    large, small = branch_rank_profiles(traced("towers"), plan_of(TOWERS))
    assert {p.names[0].partition(".")[0] for p in large.parameters} == {"large"}
    assert small.parameter_count == FEATURES * SMALL + SMALL + SMALL * WIDTH + WIDTH
    # A forward product and one for the gradient of the weight; only the second layer has one for its input.
    assert large.flops(4) == 2 * 4 * LARGE * (2 * FEATURES + 3 * WIDTH)
    assert large.flops(4) + small.flops(4) == traced("towers").flops(4)
    wide, narrow = branch_rank_profiles(traced("heads"), plan_of(HEADS))
    shared = {"up.weight", "up.bias", "down.weight", "down.bias"}
    assert {p.names[0] for p in narrow.parameters} == shared | {"narrow.weight", "narrow.bias"}
    assert shared < {p.names[0] for p in wide.parameters}
    remote_layers = [o.layer for s in narrow.segments for o in s.operators if o.layer.startswith("wide")]
    assert not remote_layers


def test_shared_layers_are_split_and_branches_are_not() -> None:
    wide, _ = (split_profile(rank, plan_of(HEADS)) for rank in branch_rank_profiles(traced("heads"), plan_of(HEADS)))
    shapes = {p.names[0]: p.shape for p in wide.parameters}
    assert shapes["up.weight"] == (FEATURES // 2, WIDTH)
    assert shapes["wide.0.weight"] == (LARGE, WIDTH)


def test_one_rank_or_no_branches_change_nothing() -> None:
    whole = traced("towers")
    assert branch_rank_profiles(whole, Plan.model_validate({"axes": {"tensor": 2}})) == (whole,)
    one_rank = Plan.model_validate({"modules": {"branches": {"large": 0, "small": 0}}})
    assert step("towers", one_rank) == step("towers", Plan())


def test_equal_heads_of_a_list_are_placed_on_different_ranks() -> None:
    class EqualHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Linear(WIDTH, WIDTH)
            self.heads = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, LARGE), nn.Linear(LARGE, 4)) for _ in range(4))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            shared = self.trunk(x)
            return tuple(head(shared) for head in self.heads)

    with torch.device("meta"):
        profile = trace_profile(EqualHeads(), (torch.empty(2, WIDTH), torch.empty(2)), squares, with_structure=True)
    branches = {f"heads.{head}": int(head > 2) for head in range(4)}
    three_heads, one_head = branch_rank_profiles(profile, plan_of(branches))
    head, trunk = WIDTH * LARGE + LARGE + LARGE * 4 + 4, WIDTH * WIDTH + WIDTH
    assert (three_heads.parameter_count, one_head.parameter_count) == (trunk + 3 * head, trunk + head)
    head_flops = 2 * 3 * (WIDTH * LARGE + LARGE * 4)
    assert three_heads.flops(1) - one_head.flops(1) == pytest.approx(2 * head_flops)
    for rank in (three_heads, one_head):
        unfreed_bytes = sum(
            s.block_count * c.bytes.at(8) * c.tensor_count
            for s in rank.segments
            for c in s.changes
            if c.role == "saved"
        )
        assert unfreed_bytes == 0


def test_unknown_branches_and_pipelines_are_refused() -> None:
    with pytest.raises(InputError, match="the model has no module 'larg'"):
        step("towers", plan_of({"larg": 0}))
    cut = plan_of(TOWERS, axes={"pipeline": 2}, pipeline={"cuts": ["large"]})
    with pytest.raises(InputError, match=r"large is placed on one rank of the tensor axis, which a pipeline does not"):
        step("towers", cut)


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


ZOO_BRANCHES = {"two_tower": {"query": 0, "document": 1}, "multitask": {"classify": 0, "estimate": 1}}


def zoo_plan(kind: str, axes: dict[str, int]) -> Plan:
    whole = {"encoder.0": {"kind": "none"}} if kind == "multitask" else {}
    return plan_of(ZOO_BRANCHES[kind], axes=axes, modules={"branches": ZOO_BRANCHES[kind], "splits": whole})


def count_step(rank: int, size: int, kind: str, plan: Plan) -> tuple[dict[Any, int], dict[str, int]]:
    """Returns the bytes that this rank exchanges in a step, by axis and collective, and the bytes that it holds."""
    torch.manual_seed(0)
    workload, data = ZOO[kind], RandomSamples(ZOO[kind].data)
    session = Session(
        workload.model(),
        lambda parameters: torch.optim.AdamW(parameters.values()),
        loss=workload.loss,
        plan=plan,
        world=world(rank, size),
        sample=default_collate([data[0]] * 2),
    )
    batches = session.batches(data, 1, BATCH)
    session.step(next(batches))
    with count_traffic(session._parallel.mesh) as traffic:
        session.step(next(batches))
    return bytes_by_collective(traffic.collectives), local_bytes(session.module, session.optimizer)


@pytest.mark.parametrize("kind", ZOO_BRANCHES)
def test_two_ranks_exchange_and_hold_the_predicted_bytes(two: RankPool, kind: str) -> None:
    check_prediction(two, kind, zoo_plan(kind, {}))


@pytest.mark.soak
@pytest.mark.parametrize("kind", ZOO_BRANCHES)
@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_four_ranks_exchange_and_hold_the_predicted_bytes(four: RankPool, kind: str, axis: str) -> None:
    check_prediction(four, kind, zoo_plan(kind, {axis: 2}))


def check_prediction(pool: RankPool, kind: str, plan: Plan) -> None:
    measured = pool.run(count_step, kind, plan)
    data = RandomSamples(ZOO[kind].data)
    with torch.device("meta"):
        model = ZOO[kind].model()
    sample = default_collate([data[0], data[1]])
    whole = trace_profile(model, sample, ZOO[kind].loss, with_structure=True, on_gpu=False)
    predicted: dict[Any, float] = {}
    for exchange in exchanges(whole, plan, BATCH / plan.batch_parts):
        key = exchange.axis, exchange.collective
        predicted[key] = predicted.get(key, 0.0) + exchange.bytes * exchange.count
    counted = {key: max(sent.get(key, 0) for sent, _ in measured) for sent, _ in measured for key in sent}
    assert counted == pytest.approx(predicted)
    adam = measure_optimizer_cost(lambda parameters: torch.optim.AdamW(parameters), multi_tensor=False)
    parts = predict_memory(whole, plan, BATCH // plan.batch_parts, adam, CPU_MEMORY).breakdown
    weights = max(local["weights"] for _, local in measured)
    assert parts["weights"] == pytest.approx(weights, rel=0.05)  # rows that shards do not divide


def test_ranks_wait_for_each_other_where_outputs_are_used_and_gradients_are_summed() -> None:
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
    predicted = step(kind, plan_of(branches, axes=axes, memory={"accumulation": 2}))
    assert sum(predicted.breakdown.values()) == pytest.approx(predicted.step_s)
    assert min(predicted.breakdown.values()) >= 0
    assert predicted.breakdown["tensor"] > 0


def test_the_step_takes_as_long_as_the_slowest_rank() -> None:
    batch = 2.0**20  # computing takes longer than starting operators
    two_ranks = step("towers", plan_of(TOWERS), batch)
    one_rank = step("towers", plan_of({"large": 0, "small": 0}), batch)
    without = step("towers", Plan(), batch)
    assert two_ranks.step_s < one_rank.step_s
    assert one_rank.breakdown["compute"] == pytest.approx(without.breakdown["compute"])
    large = branch_rank_profiles(traced("towers"), plan_of(TOWERS))[0]
    large_tower = predict_step(cluster_from_name("8xA100-80GB"), large, Plan(), batch, ADAMW)
    assert two_ranks.breakdown["compute"] == pytest.approx(large_tower.breakdown["compute"])


def test_gradients_of_a_branch_are_averaged_only_on_its_ranks() -> None:
    axes = {"replicate": 8}
    step_exchanges = exchanges(traced("towers"), plan_of(TOWERS, axes=axes), 8)
    averaged_bytes = sum(e.bytes * e.count for e in step_exchanges if e.axis == "replicate")
    large = branch_rank_profiles(traced("towers"), plan_of(TOWERS))[0]
    assert averaged_bytes == large.parameter_bytes + 4 * len(large.parameters)  # and whether each is used


def test_the_predicted_memory_is_that_of_the_rank_with_most() -> None:
    whole = traced("towers")
    large, small = branch_rank_profiles(whole, plan_of(TOWERS))
    parts = predict_memory(whole, plan_of(TOWERS), 8, ADAMW, CPU_MEMORY).breakdown
    assert parts["weights"] == large.parameter_bytes
    assert parts["optimizer state"] == 2 * large.parameter_bytes
    assert small.parameter_bytes < large.parameter_bytes
