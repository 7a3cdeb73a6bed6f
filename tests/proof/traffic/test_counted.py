"""What ranks exchange and hold is what was predicted: counted in a step, against the plan's prediction.

Each case runs a step of fp32 on Gloo. Bytes are compared by axis and collective, exactly, on the rank of each pipeline
stage that sends most: where words, rows or tokens do not divide evenly, the first ranks have more than the others. What
ranks only say to each other is left out (`counted.FEW`): sums of losses, counts and norms, and whole numbers, which are
sizes and flags. Buffers are the `broadcast`; how many a stage has no profile knows, so all stages are taken together.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import default_collate

from meshwright.blocks.recompute import Recompute
from meshwright.errors import MeshwrightError
from meshwright.launch.world import World
from meshwright.plan import Plan
from meshwright.profile.optimizer import optimizer_cost
from meshwright.profile.tracing.trace import profile
from meshwright.profile.values import ModelProfile
from meshwright.simulator.memory.peak import CPU_MEMORY, predict_memory
from meshwright.train.session import Session
from tests.proof.counted import Counted, counting, held_bytes, total
from tests.proof.matrix import every, plan_of
from tests.ranks import RankPool, ranks
from tests.simulator.traffic import exchanges
from tests.zoo import BATCH, ZOO, Made

Key = tuple[str | None, str]
Found = tuple[int, tuple[Counted, ...], dict[str, int]]
A_FEW = (
    ("mnist", "R2 twice"),
    ("vgg", "R2 wide"),
    ("resnet", "S2 synchronized"),
    ("gpt", "S2 twice"),
    ("gpt", "S2 gradients"),
    ("gpt", "S2 optimizer"),
    ("gpt", "T2"),
    ("gpt", "T2 sequence loss"),
    ("bert", "P2"),
    ("resnet", "R2P2 twice"),
    ("gpt", "R2T2 twice"),
    ("gpt", "S2P2 twice"),
    ("gpt", "T2P2 sequence"),
)
# Kind, axis or word of the case, what differs, and why.
KNOWN: tuple[tuple[str, str, tuple[Key, ...], str], ...] = (
    (
        "multitask",
        "T2",
        (("tensor", "all_reduce"),),
        "two heads share an input, whose gradient is summed once: a profile does not tell that it is the same. One has"
        " a single number a sample: so few are not counted",
    ),
    (
        "bert",
        "sequence",
        (("tensor", "all_gather"), ("tensor", "all_reduce"), ("tensor", "reduce_scatter")),
        "torch's own attention is not split, and gathers a divided sequence for its products",
    ),
)
MOST = 0.1  # bytes held


def step(rank: int, size: int, kind: str, case: str) -> Found:
    """The pipeline rank, what it exchanged in its second step and what it holds behind that."""
    torch.manual_seed(0)
    made, plan = ZOO[kind], plan_of(kind, case)
    data = Made(made.data)
    session = Session(
        made.model(),
        lambda held: torch.optim.AdamW(held.values()),
        loss=made.loss,
        plan=plan,
        world=World(rank, rank, size, size, 0, torch.device("cpu"), None),
        clip_norm=1.0,
        sample=default_collate([data[0]] * 2),
    )
    batches = session.batches(data, 1, BATCH)
    session.step(next(batches))
    parallel = session._parallel
    with counting(parallel.mesh) as count:
        session.step(next(batches))
    return parallel.place.pipeline, count.exchanges, held_bytes(session.module, session.optimizer)


@cache
def traced(kind: str, recompute: Recompute) -> ModelProfile:
    data = Made(ZOO[kind].data)
    with torch.device("meta"):
        model = ZOO[kind].model()
    batch = default_collate([data[0], data[1]])
    return profile(model, batch, ZOO[kind].loss, recompute=recompute, structured=True, on_gpu=False)


def predicted(kind: str, plan: Plan, stage: int) -> dict[Key, float]:
    sums: dict[Key, float] = {}
    found = traced(kind, plan.memory.recompute)
    for exchange in exchanges(found, plan, BATCH / plan.shares, pipeline_rank=stage):
        key = (exchange.axis, exchange.collective)
        sums[key] = sums.get(key, 0.0) + exchange.bytes * exchange.count
    return sums


def most(of: list[dict[Key, int]]) -> dict[Key, int]:
    return {key: max(one.get(key, 0) for one in of) for one in of for key in one}


def together(stages: list[dict[Key, float]]) -> dict[Key, float]:
    """Buffers of all stages."""
    keys = {key for stage in stages for key in stage if key[1] == "broadcast"}
    return {key: sum(stage.pop(key, 0.0) for stage in stages) for key in keys}


def differing(kind: str, case: str) -> set[Key]:
    return {key for known, word, keys, _ in KNOWN if known == kind and word in case for key in keys}


def check_exchanged(kind: str, case: str, found: list[Found]) -> None:
    plan = plan_of(kind, case)
    stages = range(plan.axes.pipeline)
    sent: list[dict[Key, float]] = [
        {**most([total(count) for place, count, _ in found if place == stage])} for stage in stages
    ]
    stated = [predicted(kind, plan, stage) for stage in stages]
    assert together(sent) == pytest.approx(together(stated), abs=len(stated))  # they are divided in whole bytes
    known = differing(kind, case)
    for stage, (counted, said) in enumerate(zip(sent, stated, strict=True)):
        assert counted.keys() == said.keys(), stage
        for key in counted.keys() - known:
            assert counted[key] == pytest.approx(said[key], rel=1e-9), (stage, key)


def check_held(kind: str, case: str, found: list[Found]) -> None:
    """Of the rank that holds most."""
    plan = plan_of(kind, case)
    adam = optimizer_cost(lambda parameters: torch.optim.AdamW(parameters), at_once=False)
    # With temporaries this large the optimizer's step is the peak, and gradients are what is there then.
    at_step = replace(adam, temporary=1e6)
    parts = predict_memory(traced(kind, plan.memory.recompute), plan, BATCH // plan.shares, at_step, CPU_MEMORY)
    assert parts.peak_at == "optimizer step"
    stated = {"gradients": parts.breakdown.get("gradient buckets", 0), **parts.breakdown}
    largest = max((held for *_, held in found), key=lambda held: sum(held.values()))
    for part, size in largest.items():
        assert stated[part] == pytest.approx(size, rel=MOST), part


def check(pool: RankPool, kind: str, case: str) -> None:
    found = pool.run(step, kind, case)
    check_exchanged(kind, case, found)
    check_held(kind, case, found)


def small_worlds() -> list[tuple[str, str]]:
    return [(kind, case) for kind, case in every() if plan_of(kind, case).world_size <= 4]


@pytest.mark.parametrize(("kind", "case"), A_FEW)
def test_ranks_exchange_and_hold_what_was_predicted(kind: str, case: str) -> None:
    with ranks(plan_of(kind, case).world_size) as pool:
        check(pool, kind, case)


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "case"), small_worlds())
def test_under_every_plan_of_up_to_four_ranks(kind: str, case: str) -> None:
    with ranks(plan_of(kind, case).world_size) as pool:
        check(pool, kind, case)


# ---- the count itself


def several(rank: int, size: int) -> tuple[Counted, ...]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tensor"))
    group = mesh.get_group("tensor")
    large = torch.ones(64)
    with counting(mesh) as count:
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
    return count.exchanges


def test_each_collective_is_counted_with_its_axis_and_bytes(four: RankPool) -> None:
    for found in four.run(several):
        assert set(found) == {
            Counted("tensor", "all_reduce", 256, says=False, count=2),
            Counted("tensor", "all_reduce", 256, says=True),
            Counted("replicate", "all_reduce", 4, says=True),
            Counted("tensor", "all_gather", 512, says=False, count=2),
            Counted("tensor", "reduce_scatter", 256, says=False),
            Counted("tensor", "all_to_all", 256, says=False),
            Counted(None, "broadcast", 64, says=False),
            Counted(None, "point_to_point", 256, says=False),
        }
        assert total(found)["tensor", "all_gather"] == 1024


def replicas(rank: int, size: int) -> tuple[Counted, ...]:
    """DDP starts its collectives from C++, in the backward pass."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("replicate",))
    model: nn.Module = nn.parallel.DistributedDataParallel(nn.Linear(16, 4), process_group=mesh.get_group("replicate"))
    with counting(mesh) as count:
        out: Tensor = model(torch.ones(2, 16))
        out.sum().backward()
    return count.exchanges


def test_what_c_plus_plus_starts_is_counted(four: RankPool) -> None:
    assert total(four.run(replicas)[0]) == {("replicate", "all_reduce"): (16 * 4 + 4) * 4}


def other(rank: int, size: int) -> str:
    with counting(None):
        try:
            torch.distributed.reduce(torch.ones(8), 0)
        except MeshwrightError as error:
            return str(error)
    return ""


def test_a_collective_that_it_does_not_know_is_refused(four: RankPool) -> None:
    assert all("c10d.reduce_" in said for said in four.run(other))
