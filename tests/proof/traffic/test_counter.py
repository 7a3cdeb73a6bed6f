"""Ranks exchange and hold the bytes that were predicted: counted in a step, and compared with the plan's prediction.

Each case runs a step of fp32 on Gloo. Bytes are compared by axis and collective, exactly, on the rank of each pipeline
stage that sends most: where words, rows or tokens do not divide evenly, the first ranks have more than the others.
Collectives for control are left out (`counter.MOST_CONTROL_NUMBERS`): sums of losses, counts and norms, sizes and
flags. Buffers are the `broadcast`; a profile does not say how many each stage has, so all stages are added up.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import default_collate

from meshwright.blocks.recompute import Recompute
from meshwright.errors import MeshwrightError
from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.profile.optimizer import OptimizerCost, measure_optimizer_cost
from meshwright.profile.tracing.trace import trace_profile
from meshwright.profile.values import ModelProfile
from meshwright.simulator.context import without_context
from meshwright.simulator.memory.device_memory import CPU_MEMORY
from meshwright.simulator.memory.peak import predict_memory, rank_memories
from meshwright.simulator.traffic import exchanges
from meshwright.train.session import Session
from tests.proof.matrix import all_cases, plan_of
from tests.proof.traffic.counter import CountedCollective, bytes_by_collective, count_traffic, local_bytes
from tests.ranks import RankPool, ranks
from tests.zoo import BATCH, ZOO, RandomSamples

Key = tuple[str | None, str]
TOKENS: Key = ("expert", "all_to_all")
# The pipeline rank, its collectives and the bytes that it holds.
RankTraffic = tuple[int, tuple[CountedCollective, ...], dict[str, int]]
QUICK = (
    ("vgg", "R2 wide"),
    ("gpt", "S2 gradients"),
    ("gpt", "T2 sequence loss"),
    ("mnist", "S2P2 twice"),
    ("bert", "C2 ring"),
)
# Kind of model, a part of the case, the collectives that differ from the prediction, and why.
KNOWN_DIFFERENCES: tuple[tuple[str, str, tuple[Key, ...], str], ...] = (
    (
        "multitask",
        "T2",
        (("tensor", "all_reduce"),),
        "two heads share an input, whose gradient is summed once: a profile does not say that it is the same. One head"
        " has a single number per sample: so few are not counted",
    ),
    (
        "bert",
        "sequence",
        (("tensor", "all_gather"), ("tensor", "all_reduce"), ("tensor", "reduce_scatter")),
        "torch's attention is not split, and gathers a divided sequence for its products",
    ),
    (
        "bert",
        "C2T2 ring sequence",
        (("context", "all_gather"), ("context", "reduce_scatter")),
        "an attention that gathers the sequence along the tensor axis gathers keys and values along the context axis"
        " once, for both passes, also in a plan with a ring",
    ),
)
LARGEST_RELATIVE_ERROR = 0.1  # of the bytes held


def count_step(rank: int, size: int, kind: str, case: str) -> RankTraffic:
    """Counts the second step of a case, and the bytes held after it."""
    torch.manual_seed(0)
    workload, plan = ZOO[kind], plan_of(kind, case)
    data = RandomSamples(workload.data)
    session = Session(
        workload.model(),
        lambda parameters: torch.optim.AdamW(parameters.values()),
        loss=workload.loss,
        plan=plan,
        world=World(rank, rank, size, size, 0, torch.device("cpu"), None),
        clip_norm=1.0,
        sample=default_collate([data[0]] * 2),
    )
    batches = session.batches(data, 1, BATCH)
    session.step(next(batches))
    parallel = session._parallel
    with count_traffic(parallel.mesh) as counter:
        session.step(next(batches))
    return parallel.position.pipeline, counter.collectives, local_bytes(session.module, session.optimizer)


@cache
def trace(kind: str, recompute: Recompute) -> ModelProfile:
    data = RandomSamples(ZOO[kind].data)
    with torch.device("meta"):
        model = ZOO[kind].model()
    batch = default_collate([data[0], data[1]])
    return trace_profile(model, batch, ZOO[kind].loss, recompute=recompute, with_structure=True, on_gpu=False)


def predict_bytes(kind: str, plan: Plan, stage: int) -> dict[Key, float]:
    sums: dict[Key, float] = {}
    profile = trace(kind, plan.memory.recompute)
    for exchange in exchanges(profile, plan, BATCH / plan.batch_parts, pipeline_rank=stage):
        key = (exchange.axis, exchange.collective)
        sums[key] = sums.get(key, 0.0) + exchange.bytes * exchange.count
    return sums


def largest_by_key(ranks: list[dict[Key, int]]) -> dict[Key, int]:
    return {key: max(counts.get(key, 0) for counts in ranks) for rank_counts in ranks for key in rank_counts}


def take_buffers(stages: list[dict[Key, float]]) -> dict[Key, float]:
    """Removes the bytes of buffers from all stages and returns their sums."""
    keys = {key for stage in stages for key in stage if key[1] == "broadcast"}
    return {key: sum(stage.pop(key, 0.0) for stage in stages) for key in keys}


def known_differences(kind: str, case: str) -> set[Key]:
    return {
        key
        for known_kind, case_part, keys, _ in KNOWN_DIFFERENCES
        if known_kind == kind and case_part in case
        for key in keys
    }


def check_exchanged(kind: str, case: str, ranks: list[RankTraffic]) -> None:
    plan = plan_of(kind, case)
    stages = range(plan.axes.pipeline)
    counted: list[dict[Key, float]] = [
        {**largest_by_key([bytes_by_collective(traffic) for rank, traffic, _ in ranks if rank == stage])}
        for stage in stages
    ]
    for stage, of_stage in enumerate(counted):
        if TOKENS in of_stage:  # what a rank sends back depends on the routing, but not what all of them send
            of_ranks = [bytes_by_collective(traffic)[TOKENS] for rank, traffic, _ in ranks if rank == stage]
            of_stage[TOKENS] = sum(of_ranks) / len(of_ranks)
    predicted = [predict_bytes(kind, plan, stage) for stage in stages]
    # Buffers are divided in whole bytes.
    assert take_buffers(counted) == pytest.approx(take_buffers(predicted), abs=len(predicted))
    for stage, (actual, expected) in enumerate(zip(counted, predicted, strict=True)):
        known = known_differences(kind, case)
        assert actual.keys() - known == expected.keys() - known, stage
        for key in actual.keys() - known:
            assert actual[key] == pytest.approx(expected[key], rel=1e-9), (stage, key)


def check_held(kind: str, case: str, ranks: list[RankTraffic]) -> None:
    """Checks the bytes of the rank that holds most."""
    plan = plan_of(kind, case)
    at_step = _at_step()
    batch = BATCH // plan.batch_parts / plan.axes.context
    prediction = predict_memory(trace(kind, plan.memory.recompute), without_context(plan), batch, at_step, CPU_MEMORY)
    assert prediction.peak_at == "optimizer step"
    predicted = {"gradients": prediction.breakdown.get("gradient buckets", 0), **prediction.breakdown}
    largest = max((held for *_, held in ranks), key=lambda held: sum(held.values()))
    for part, size in largest.items():
        assert predicted[part] == pytest.approx(size, rel=LARGEST_RELATIVE_ERROR), part


def _at_step() -> OptimizerCost:
    """With temporaries this large the peak is in the optimizer step, where gradients are still held."""
    adam = measure_optimizer_cost(lambda parameters: torch.optim.AdamW(parameters), multi_tensor=False)
    return replace(adam, temporary_ratio=1e6)


def check(pool: RankPool, kind: str, case: str) -> None:
    traffic = pool.run(count_step, kind, case)
    check_exchanged(kind, case, traffic)
    check_held(kind, case, traffic)


SHARDS = ("S2 gradients shards", "S2 twice shards", "S3 optimizer shards", "R2S2 twice shards", "S2P2 twice shards")


@pytest.mark.soak
@pytest.mark.parametrize("case", SHARDS)
def test_shards_in_proportion_are_padded_for_exchanges_only(case: str) -> None:
    """Each rank holds what is predicted for its coordinate on the shard axis, not only the rank with most."""
    plan = plan_of("gpt", case)
    with ranks(plan.world_size) as pool:
        traffic = pool.run(count_step, "gpt", case)
    check_exchanged("gpt", case, traffic)
    for rank, (stage, _, held) in enumerate(traffic):
        shard_part, batch = plan.shard_part(rank % plan.axes.shard), BATCH // plan.batch_parts
        predicted = rank_memories(trace("gpt", "none"), plan, batch, _at_step(), CPU_MEMORY, shard_part)[stage]
        for part, size in held.items():
            assert predicted.breakdown[part] == pytest.approx(size, rel=LARGEST_RELATIVE_ERROR), (rank, part)


def small_worlds() -> list[tuple[str, str]]:
    return [(kind, case) for kind, case in all_cases() if plan_of(kind, case).world_size <= 4]


@pytest.mark.parametrize(("kind", "case"), QUICK)
def test_ranks_exchange_and_hold_what_was_predicted(kind: str, case: str) -> None:
    with ranks(plan_of(kind, case).world_size) as pool:
        check(pool, kind, case)


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "case"), small_worlds())
def test_under_every_plan_of_up_to_four_ranks(kind: str, case: str) -> None:
    with ranks(plan_of(kind, case).world_size) as pool:
        check(pool, kind, case)


@pytest.fixture(scope="module")
def eight() -> Iterator[RankPool]:
    with ranks(8, 300) as pool:
        yield pool


@pytest.mark.soak
@pytest.mark.parametrize("case", [c for k, c in all_cases() if k == "mixture" and plan_of(k, c).world_size == 8])
def test_experts_on_eight_ranks(eight: RankPool, case: str) -> None:
    traffic = eight.run(count_step, "mixture", case)
    check_exchanged("mixture", case, traffic)
    check_held("mixture", case, traffic)


# ---- the counter itself


def run_every_collective(rank: int, size: int) -> tuple[CountedCollective, ...]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tensor"))
    group = mesh.get_group("tensor")
    large = torch.ones(64)
    with count_traffic(mesh) as counter:
        torch.distributed.all_reduce(large, group=group)
        torch.distributed.all_reduce(large, group=group)
        torch.distributed.all_reduce(large.int(), group=group)
        torch.distributed.all_reduce(large.sum(), group=mesh.get_group("replicate"))
        torch.distributed.all_gather([torch.empty(64), torch.empty(64)], large, group=group)
        torch.distributed.all_gather_into_tensor(torch.empty(128), large, group=group)
        torch.distributed.reduce_scatter_tensor(torch.empty(32), large, group=group)
        torch.distributed.all_to_all_single(torch.empty(64), large, group=group)
        torch.distributed.broadcast(torch.ones(8, dtype=torch.int64), 0)
        other = (rank + 2) % 4
        both = [torch.distributed.isend(large, other), torch.distributed.irecv(torch.empty(64), other)]
        for work in both:
            assert work is not None
            work.wait()
        torch.distributed.barrier()
    torch.distributed.all_reduce(large)  # not counted
    return counter.collectives


def test_each_collective_is_counted_with_its_axis_and_bytes(four: RankPool) -> None:
    for collectives in four.run(run_every_collective):
        assert set(collectives) == {
            CountedCollective("tensor", "all_reduce", 256, is_control=False, count=2),
            CountedCollective("tensor", "all_reduce", 256, is_control=True),
            CountedCollective("replicate", "all_reduce", 4, is_control=True),
            CountedCollective("tensor", "all_gather", 512, is_control=False, count=2),
            CountedCollective("tensor", "reduce_scatter", 256, is_control=False),
            CountedCollective("tensor", "all_to_all", 256, is_control=False),
            CountedCollective(None, "broadcast", 64, is_control=False),
            CountedCollective(None, "point_to_point", 256, is_control=False),
        }
        assert bytes_by_collective(collectives)["tensor", "all_gather"] == 1024


def train_with_ddp(rank: int, size: int) -> tuple[CountedCollective, ...]:
    """DDP starts its collectives from C++, in the backward pass."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("replicate",))
    model: nn.Module = nn.parallel.DistributedDataParallel(nn.Linear(16, 4), process_group=mesh.get_group("replicate"))
    with count_traffic(mesh) as counter:
        out: Tensor = model(torch.ones(2, 16))
        out.sum().backward()
    return counter.collectives


def test_collectives_started_from_c_plus_plus_are_counted(four: RankPool) -> None:
    assert bytes_by_collective(four.run(train_with_ddp)[0]) == {("replicate", "all_reduce"): (16 * 4 + 4) * 4}


def run_unknown_collective(rank: int, size: int) -> str:
    with count_traffic(None):
        try:
            torch.distributed.reduce(torch.ones(8), 0)
        except MeshwrightError as error:
            return str(error)
    return ""


def test_an_unknown_collective_is_an_error(four: RankPool) -> None:
    assert all("c10d.reduce_" in message for message in four.run(run_unknown_collective))
