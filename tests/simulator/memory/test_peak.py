"""Predicted memory is what GPUs and CPU ranks were measured to need, and its parts add up."""

import json
from dataclasses import replace
from functools import cache
from statistics import median
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.errors import InputError
from meshwright.launch.world import World
from meshwright.plan import Plan
from meshwright.profile.optimizer import measure_optimizer_cost
from meshwright.profile.tracing.trace import trace_profile
from meshwright.profile.values import ModelProfile
from meshwright.simulator.memory.device_memory import CPU_MEMORY, CUDA_MEMORY, DeviceMemory
from meshwright.simulator.memory.peak import predict_memory
from meshwright.train.session import Session
from meshwright.workloads.text.decoder import Decoder
from tests.profile.models import scores_loss, small_model
from validation.memory import sharded as memory_sharded
from validation.memory.one_gpu import MEASURED, cases, predict

MEDIAN, WORST = 0.03, 0.06
A_FEW = ("vgg16-32-bf16", "gpt2-xl-1-bf16", "llama-1b-4-bf16-full")


def errors(names: tuple[str, ...] | None = None) -> dict[str, float]:
    measured: dict[str, Any] = json.loads(MEASURED.read_text())
    found = {row["name"]: row["allocated_bytes"] for row in measured["rows"]}
    chosen = [case for case in cases() if names is None or case["name"] in names]
    return {c["name"]: predict(c).allocated_bytes / found[c["name"]] - 1 for c in chosen}


def test_a_few_steps_measured_on_an_h200_are_predicted() -> None:
    off = errors(A_FEW)
    assert len(off) == len(A_FEW)
    assert median(map(abs, off.values())) <= MEDIAN, off
    assert max(map(abs, off.values())) <= WORST, off


@pytest.mark.soak
def test_all_steps_measured_on_an_h200_are_predicted() -> None:
    pytest.importorskip("transformers")
    off = errors()
    assert len(off) == len(cases()) >= 30
    assert median(map(abs, off.values())) <= MEDIAN, off
    assert max(map(abs, off.values())) <= WORST, off


@pytest.mark.soak
def test_sharded_ranks_measured_on_an_h200_are_predicted() -> None:
    rows = json.loads(memory_sharded.MEASURED.read_text())["rows"]
    off = [memory_sharded.predict(row).allocated_bytes / row["allocated_bytes"] - 1 for row in rows]
    assert {row["sharding"] for row in rows} == {"gradients", "parameters"}
    assert max(map(abs, off)) <= MEDIAN, off


@cache
def eight_blocks() -> ModelProfile:
    with torch.device("meta"):
        model = Decoder(layers=8, hidden=64, heads=8, sequence=64, vocabulary=128, tied=False)
        tokens = torch.empty(2, 64, dtype=torch.long)
    return trace_profile(model, (tokens, tokens), scores_loss, with_structure=True)


def decoder_needs(batch: int = 4, **groups: Any) -> Any:
    adam = measure_optimizer_cost(lambda parameters: torch.optim.Adam(parameters), multi_tensor=True)
    return predict_memory(eight_blocks(), Plan.model_validate(groups), batch, adam, CUDA_MEMORY)


def test_each_axis_divides_what_it_should() -> None:
    alone = decoder_needs().breakdown
    shard = decoder_needs(axes={"shard": 4}).breakdown
    tensor = decoder_needs(axes={"tensor": 4}).breakdown
    stage = decoder_needs(axes={"pipeline": 2}, pipeline={"cuts": ["blocks.3"], "microbatches": 2}).breakdown
    assert shard["weights"] == pytest.approx(alone["weights"] / 4)
    assert shard["optimizer state"] == pytest.approx(alone["optimizer state"] / 4)
    assert shard["activations"] == pytest.approx(alone["activations"], rel=0.05)
    assert alone["weights"] / 4 < tensor["weights"] < alone["weights"] / 3
    assert alone["activations"] / 4 < tensor["activations"] < alone["activations"] * 0.7
    assert stage["weights"] == pytest.approx(alone["weights"] / 2, rel=0.1)
    for parts in (shard, tensor, stage):
        assert parts["optimizer state"] == pytest.approx(2 * parts["weights"], rel=0.01)


def test_levels_of_sharding_hold_less_and_less() -> None:
    needs = {
        level: decoder_needs(axes={"shard": 4}, memory={"sharding": level, "accumulation": 2}, batch=1).allocated_bytes
        for level in ("optimizer", "gradients", "parameters")
    }
    assert needs["optimizer"] > needs["gradients"] > needs["parameters"]


def test_a_pipeline_holds_as_many_microbatches_as_it_runs_ahead() -> None:
    def held(schedule: str, microbatches: int, cuts: list[str] | None = None) -> int:
        pipeline = {"schedule": schedule, "microbatches": microbatches, "cuts": cuts or ["blocks.3"]}
        return int(decoder_needs(axes={"pipeline": 2}, pipeline=pipeline).breakdown["activations"])

    assert held("1f1b", 2) == held("1f1b", 16)
    assert held("gpipe", 16) > 5 * held("1f1b", 16)
    assert held("interleaved_1f1b", 16, ["blocks.1", "blocks.3", "blocks.5"]) > held("1f1b", 16)


@pytest.mark.parametrize("groups", [{}, {"axes": {"shard": 2}}, {"axes": {"replicate": 2}}])
def test_equal_blocks_are_replayed_as_if_one_by_one(groups: dict[str, Any]) -> None:
    found = eight_blocks()
    apart = [replace(s, blocks=(block,)) for s in found.segments for block in s.blocks or ("",)]
    one_by_one = replace(found, segments=tuple(replace(s, blocks=s.blocks if s.unit else ()) for s in apart))
    assert len(one_by_one.segments) > len(found.segments)
    adam = measure_optimizer_cost(lambda parameters: torch.optim.Adam(parameters), multi_tensor=True)
    plan = Plan.model_validate(groups)
    for batch in (1, 64):
        needs = [predict_memory(p, plan, batch, adam, CUDA_MEMORY) for p in (found, one_by_one)]
        assert needs[0] == needs[1]


def test_a_pipeline_without_cuts_is_refused() -> None:
    with pytest.raises(InputError, match="a pipeline of 2 ranks but no cuts"):
        decoder_needs(axes={"pipeline": 2})


def held_bytes(model: nn.Module, session: Session, batch: Any) -> dict[str, int]:
    """What a real rank holds after a step."""
    session.step(batch)
    state = [v for entry in session.optimizer.state.values() for v in entry.values() if v.numel() > 1]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return {
        "weights": sum(p.numel() * p.element_size() for p in model.parameters()),
        "gradients": sum(g.numel() * g.element_size() for g in gradients),
        "optimizer state": sum(v.numel() * v.element_size() for v in state),
    }


@pytest.mark.parametrize("name", ["mnist", "resnet18", "gpt"])
def test_a_cpu_rank_holds_what_was_predicted(name: str) -> None:
    model, batch, loss = small_model(name)
    adam = measure_optimizer_cost(lambda parameters: torch.optim.Adam(parameters), multi_tensor=False)
    found = trace_profile(model, batch, loss, on_gpu=False)
    at_step = predict_memory(found, Plan(), 0, adam, CPU_MEMORY)  # without samples the optimizer step is the peak
    world = World(0, 0, 1, 1, 0, torch.device("cpu"), None)
    session = Session(model, lambda held: torch.optim.Adam(held.values()), loss=loss, plan=Plan(), world=world)
    for part, size in held_bytes(model, session, batch).items():
        assert at_step.breakdown[part] == pytest.approx(size, rel=0.05), part


def test_the_parts_add_up_and_the_figures_are_kept_apart() -> None:
    model, batch, loss = small_model("gpt")
    sgd = measure_optimizer_cost(
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), multi_tensor=True
    )
    found = predict_memory(trace_profile(model, batch, loss), Plan(), 64, sgd, CUDA_MEMORY)
    assert sum(found.breakdown.values()) == found.allocated_bytes
    assert found.allocated_bytes <= found.reserved_bytes < found.device_bytes
    assert found.peak_at.startswith("backward of")


def test_buckets_and_accumulated_gradients_are_there_from_the_start() -> None:
    model, batch, loss = small_model("mnist")
    found = trace_profile(model, batch, loss, on_gpu=False)
    sgd = measure_optimizer_cost(lambda parameters: torch.optim.SGD(parameters, lr=0.1), multi_tensor=False)

    def peak(**groups: Any) -> Any:
        return predict_memory(found, Plan.model_validate(groups), 64, sgd, CPU_MEMORY)

    alone, replicated = peak(), peak(axes={"replicate": 2})
    assert replicated.breakdown["gradient buckets"] == found.parameter_bytes
    assert "gradient buckets" not in alone.breakdown
    assert replicated.allocated_bytes > alone.allocated_bytes
    assert peak(memory={"accumulation": 2}).allocated_bytes == replicated.allocated_bytes


@pytest.mark.parametrize(
    ("make_optimizer", "state", "temporary"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0, 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1, 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1), 1, 1),
        (lambda p: torch.optim.AdamW(p), 2, 1),
        (lambda p: torch.optim.AdamW(p, fused=True), 2, 0),
        (lambda p: torch.optim.Adam(p, amsgrad=True), 3, 1),
    ],
)
def test_an_optimizer_is_known_by_watching_it(make_optimizer: Any, state: float, temporary: float) -> None:
    cost = measure_optimizer_cost(make_optimizer, multi_tensor=True)
    assert (cost.state_ratio, cost.temporary_ratio) == (state, temporary)


def test_an_optimizer_of_single_tensors_is_counted_operator_by_operator() -> None:
    """Read and written; read and written; both read, one written."""

    class Three(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad + parameter.grad.mul_(2))

    cost = measure_optimizer_cost(Three, multi_tensor=True)
    assert (cost.multi_tensor, cost.operators_per_parameter, cost.traffic_ratio) == (False, 3, 2 + 2 + 3)
    assert measure_optimizer_cost(lambda p: torch.optim.AdamW(p), multi_tensor=True).operators_per_parameter == 0


def test_large_tensors_are_rounded_to_their_segment_where_little_is_left() -> None:
    mib = 2**20
    assert DeviceMemory().rounding(12345) == 0
    assert CUDA_MEMORY.rounding(1000) == 24
    assert CUDA_MEMORY.rounding(39.5 * mib) == 0.5 * mib
    assert CUDA_MEMORY.rounding(38.5 * mib) == 0  # a MiB and a half is left: another tensor gets it


def test_recording_is_undisturbed_by_what_the_caller_holds() -> None:
    model, (x, y), _ = small_model("mnist")
    held: list[Any] = []

    def holding(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        held[:] = [output]
        return F.cross_entropy(output, target)

    kept = trace_profile(model, (x, y), holding, on_gpu=False)
    assert kept.flops(4) == trace_profile(model, (x, y), F.cross_entropy, on_gpu=False).flops(4)
