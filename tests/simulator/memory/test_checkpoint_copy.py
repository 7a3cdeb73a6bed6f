"""The copy from which a rank writes its part of a checkpoint is as large as predicted, and counts where it is."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from meshwright.checkpoint.background import BackgroundSaver
from meshwright.cluster.detect import find_cluster
from meshwright.plan import Plan
from meshwright.planner.explanation.host_memory import host_memory
from meshwright.planner.inputs import PlanningInputs
from meshwright.processes.world import World
from meshwright.profile.optimizer import measure_optimizer_cost
from meshwright.profile.structure.structure import find_structure
from meshwright.profile.tracing.trace import trace_profile
from meshwright.profile.values import ModelProfile, Parameter
from meshwright.simulator.memory.checkpoint_copy import copy_bytes
from meshwright.simulator.memory.device_memory import CPU_MEMORY
from meshwright.simulator.memory.peak import rank_memories
from meshwright.simulator.predict import predict_plan
from meshwright.train.session import Session
from tests.ranks import RankPool
from tests.soaked import all_but
from tests.zoo import ZOO, Gpt, RandomSamples

CUTS = {"pipeline": {"microbatches": 2, "cuts": ["blocks.1"]}}
PLANS: list[dict[str, Any]] = [
    {},
    {"axes": {"replicate": 2}},
    {"axes": {"shard": 2}, "memory": {"sharding": "optimizer"}},
    {"axes": {"tensor": 2}},
    {"axes": {"pipeline": 2}, **CUTS},
    {"axes": {"replicate": 2, "tensor": 2}},
    {"axes": {"shard": 2, "pipeline": 2}, **CUTS},
    {"axes": {"replicate": 2, "expert": 2}},
    {"axes": {"shard": 2, "expert": 2}},
]


def a_model(has_experts: bool) -> nn.Module:
    torch.manual_seed(0)
    return ZOO["mixture"].model() if has_experts else Gpt(width=64)


def has_experts(plan: dict[str, Any]) -> bool:
    return "expert" in plan.get("axes", {})


def a_sample() -> Any:
    return default_collate([RandomSamples("tokens")[i] for i in range(4)])


def copied_bytes(rank: int, size: int, plan: dict[str, Any], folder: Path) -> int:
    """The bytes of this rank's copy, and of its file."""
    session = Session(
        a_model(has_experts(plan)),
        lambda parameters: torch.optim.Adam(parameters.values()),
        loss=ZOO["gpt"].loss,
        plan=Plan.model_validate(plan),
        world=World(rank, rank, size, size, 0, torch.device("cpu"), None),
        sample=a_sample(),
    )
    session.step(a_sample())
    saver = BackgroundSaver()
    saver.begin(session.state(), folder / "step-00000001", 1, session.about())
    saver.finish()
    size_bytes = saver._memory.numel()
    assert size_bytes == (folder / "step-00000001" / f"rank-{rank:05d}.bin").stat().st_size
    return size_bytes


def profile_and_adam(with_experts: bool = False) -> tuple[ModelProfile, Any]:
    adam = measure_optimizer_cost(lambda parameters: torch.optim.Adam(parameters), multi_tensor=False)
    profile = trace_profile(a_model(with_experts), a_sample(), ZOO["gpt"].loss, on_gpu=False)
    return replace(profile, structure=find_structure(a_model(with_experts), a_sample())), adam


@pytest.mark.parametrize("plan", all_but((PLANS[3],), PLANS), ids=str)
def test_the_copy_of_each_rank_is_as_large_as_predicted(
    two: RankPool, four: RankPool, tmp_path: Path, plan: dict[str, Any]
) -> None:
    profile, adam = profile_and_adam(has_experts(plan))
    parsed = Plan.model_validate(plan)
    size = parsed.world_size
    sizes = (
        [copied_bytes(0, 1, plan, tmp_path)] if size == 1 else {2: two, 4: four}[size].run(copied_bytes, plan, tmp_path)
    )
    memories = rank_memories(profile, parsed, 4, adam, CPU_MEMORY.with_checkpoint_copies(True))
    assert len(memories) == parsed.axes.pipeline
    stage_ranks = size // len(memories)  # the pipeline is the first axis of the mesh
    for rank, measured in enumerate(sizes):
        predicted = memories[rank // stage_ranks]
        assert predicted.breakdown["checkpoint copy"] == predicted.copy_bytes
        assert predicted.copy_bytes == pytest.approx(measured, rel=0.015), rank
        assert predicted.host_bytes == 0


def test_each_piece_begins_at_a_multiple_of_64_bytes() -> None:
    _, adam = profile_and_adam()
    bias = Parameter(("bias",), (20,), "float32", 80, trainable=True)
    # Two pieces of 40 bytes, three times: the values and two averages. The number of steps is written by one of them.
    shard = Plan.model_validate({"axes": {"shard": 2}})
    assert copy_bytes([bias], 0, shard, adam, {"bias": 80.0}) == (2 * 3 * 64 + 64) / 2
    # One of two ranks writes the 80 bytes, three times, and the other nothing; they take turns with other parameters.
    replicate = Plan.model_validate({"axes": {"replicate": 2}})
    assert copy_bytes([bias], 0, replicate, adam, {"bias": 80.0}) == (3 * 128 + 64) / 2


def test_without_copies_there_is_no_such_memory() -> None:
    profile, adam = profile_and_adam()
    (with_copy,) = rank_memories(profile, Plan(), 4, adam, CPU_MEMORY.with_checkpoint_copies(True))
    (without,) = rank_memories(profile, Plan(), 4, adam, CPU_MEMORY)
    assert "checkpoint copy" not in without.breakdown
    assert with_copy.allocated_bytes == without.allocated_bytes + with_copy.copy_bytes


def test_on_gpus_the_copy_is_in_cpu_memory_and_too_little_of_it_is_reported() -> None:
    profile, adam = profile_and_adam()
    cluster, plan = find_cluster("2xH100"), Plan.model_validate({"axes": {"replicate": 2}})
    inputs = PlanningInputs(cluster, 16, adam, checkpoint_copies=True)
    prediction = predict_plan(cluster, profile, plan, 16, adam, runtime=inputs.runtime)
    memory = prediction.memory
    assert "checkpoint copy" not in memory.breakdown
    assert memory.host_bytes == memory.copy_bytes > 0
    assert host_memory(plan, prediction, inputs) == []

    def on_machine_with(host_bytes: int) -> list[str]:
        nodes = tuple(node.model_copy(update={"host_memory_bytes": host_bytes}) for node in cluster.nodes)
        machine = cluster.model_copy(update={"nodes": nodes})
        return host_memory(plan, prediction, PlanningInputs(machine, 16, adam, checkpoint_copies=True))

    assert on_machine_with(2 * memory.copy_bytes) == []
    (sentence,) = on_machine_with(2 * memory.copy_bytes - 1)
    assert "set checkpoint.asynchronous to false" in sentence
