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
from meshwright.plan import Plan
from meshwright.profile.optimizer import measure_optimizer_cost
from meshwright.profile.tracing.trace import trace_profile
from meshwright.profile.values import ModelProfile
from meshwright.simulator.memory.device_memory import CPU_MEMORY, CUDA_MEMORY, DeviceMemory
from meshwright.simulator.memory.peak import predict_memory
from meshwright.train.session import Session
from meshwright.workloads.text.decoder import Decoder
from tests.profile.models import scores_loss, small_model
from tests.train.one_process import world
from validation.memory import sharded as memory_sharded
from validation.memory.one_gpu import MEASURED, cases, predict

MEDIAN, WORST = 0.03, 0.06
A_FEW = ("vgg16-32-bf16", "gpt2-xl-1-bf16", "llama-1b-4-bf16-full")


def relative_errors(names: tuple[str, ...] | None = None) -> dict[str, float]:
    """Returns the error of each predicted peak relative to the measured one, by the name of the case."""
    measured: dict[str, Any] = json.loads(MEASURED.read_text())
    peaks = {row["name"]: row["allocated_bytes"] for row in measured["rows"]}
    selected = [case for case in cases() if names is None or case["name"] in names]
    return {c["name"]: predict(c).allocated_bytes / peaks[c["name"]] - 1 for c in selected}


@pytest.mark.soak
def test_a_few_steps_measured_on_an_h200_are_predicted() -> None:
    errors = relative_errors(A_FEW)
    assert len(errors) == len(A_FEW)
    assert median(map(abs, errors.values())) <= MEDIAN, errors
    assert max(map(abs, errors.values())) <= WORST, errors


@pytest.mark.soak
def test_all_steps_measured_on_an_h200_are_predicted() -> None:
    pytest.importorskip("transformers")
    errors = relative_errors()
    assert len(errors) == len(cases()) >= 30
    assert median(map(abs, errors.values())) <= MEDIAN, errors
    assert max(map(abs, errors.values())) <= WORST, errors


@pytest.mark.soak
def test_sharded_ranks_measured_on_an_h200_are_predicted() -> None:
    rows = json.loads(memory_sharded.MEASURED.read_text())["rows"]
    errors = [memory_sharded.predict(row).allocated_bytes / row["allocated_bytes"] - 1 for row in rows]
    assert {row["sharding"] for row in rows} == {"gradients", "parameters"}
    assert max(map(abs, errors)) <= MEDIAN, errors


@cache
def eight_blocks() -> ModelProfile:
    with torch.device("meta"):
        model = Decoder(layers=8, hidden=64, heads=8, sequence=64, vocabulary=128, tied=False)
        tokens = torch.empty(2, 64, dtype=torch.long)
    return trace_profile(model, (tokens, tokens), scores_loss, with_structure=True)


def decoder_memory(batch: int = 4, **groups: Any) -> Any:
    adam = measure_optimizer_cost(lambda parameters: torch.optim.Adam(parameters), multi_tensor=True)
    return predict_memory(eight_blocks(), Plan.model_validate(groups), batch, adam, CUDA_MEMORY)


def test_each_axis_divides_its_parts_of_the_memory() -> None:
    one_rank = decoder_memory().breakdown
    shard = decoder_memory(axes={"shard": 4}).breakdown
    tensor = decoder_memory(axes={"tensor": 4}).breakdown
    stage = decoder_memory(axes={"pipeline": 2}, pipeline={"cuts": ["blocks.3"], "microbatches": 2}).breakdown
    assert shard["weights"] == pytest.approx(one_rank["weights"] / 4)
    assert shard["optimizer state"] == pytest.approx(one_rank["optimizer state"] / 4)
    assert shard["activations"] == pytest.approx(one_rank["activations"], rel=0.05)
    assert one_rank["weights"] / 4 < tensor["weights"] < one_rank["weights"] / 3
    assert one_rank["activations"] / 4 < tensor["activations"] < one_rank["activations"] * 0.7
    assert stage["weights"] == pytest.approx(one_rank["weights"] / 2, rel=0.1)
    for parts in (shard, tensor, stage):
        assert parts["optimizer state"] == pytest.approx(2 * parts["weights"], rel=0.01)


def test_each_level_of_sharding_needs_less_memory() -> None:
    needs = {
        level: decoder_memory(axes={"shard": 4}, memory={"sharding": level, "accumulation": 2}, batch=1).allocated_bytes
        for level in ("optimizer", "gradients", "parameters")
    }
    assert needs["optimizer"] > needs["gradients"] > needs["parameters"]


def test_a_pipeline_holds_the_activations_of_microbatches_in_flight() -> None:
    def activation_bytes(schedule: str, microbatches: int, cuts: list[str] | None = None) -> int:
        pipeline = {"schedule": schedule, "microbatches": microbatches, "cuts": cuts or ["blocks.3"]}
        return int(decoder_memory(axes={"pipeline": 2}, pipeline=pipeline).breakdown["activations"])

    assert activation_bytes("1f1b", 2) == activation_bytes("1f1b", 16)
    assert activation_bytes("gpipe", 16) > 5 * activation_bytes("1f1b", 16)
    assert activation_bytes("interleaved_1f1b", 16, ["blocks.1", "blocks.3", "blocks.5"]) > activation_bytes("1f1b", 16)


@pytest.mark.parametrize("groups", [{}, {"axes": {"shard": 2}}, {"axes": {"replicate": 2}}])
def test_equal_blocks_need_the_same_memory_as_blocks_replayed_one_by_one(groups: dict[str, Any]) -> None:
    merged = eight_blocks()
    segments = [replace(s, blocks=(block,)) for s in merged.segments for block in s.blocks or ("",)]
    one_by_one = replace(merged, segments=tuple(replace(s, blocks=s.blocks if s.unit else ()) for s in segments))
    assert len(one_by_one.segments) > len(merged.segments)
    adam = measure_optimizer_cost(lambda parameters: torch.optim.Adam(parameters), multi_tensor=True)
    plan = Plan.model_validate(groups)
    for batch in (1, 64):
        needs = [predict_memory(p, plan, batch, adam, CUDA_MEMORY) for p in (merged, one_by_one)]
        assert needs[0] == needs[1]


def test_a_pipeline_without_cuts_is_refused() -> None:
    with pytest.raises(InputError, match="a pipeline of 2 ranks but no cuts"):
        decoder_memory(axes={"pipeline": 2})


def held_bytes(model: nn.Module, session: Session, batch: Any) -> dict[str, int]:
    """Returns the bytes that a rank holds after a real step, by part."""
    session.step(batch)
    state = [v for entry in session.optimizer.state.values() for v in entry.values() if v.numel() > 1]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return {
        "weights": sum(p.numel() * p.element_size() for p in model.parameters()),
        "gradients": sum(g.numel() * g.element_size() for g in gradients),
        "optimizer state": sum(v.numel() * v.element_size() for v in state),
    }


@pytest.mark.parametrize("name", ["mnist", "resnet18", "gpt"])
def test_a_cpu_rank_holds_the_predicted_bytes(name: str) -> None:
    model, batch, loss = small_model(name)
    adam = measure_optimizer_cost(lambda parameters: torch.optim.Adam(parameters), multi_tensor=False)
    profile = trace_profile(model, batch, loss, on_gpu=False)
    at_step = predict_memory(profile, Plan(), 0, adam, CPU_MEMORY)  # without samples the optimizer step is the peak
    session = Session(model, lambda named: torch.optim.Adam(named.values()), loss=loss, plan=Plan(), world=world())
    for part, size in held_bytes(model, session, batch).items():
        assert at_step.breakdown[part] == pytest.approx(size, rel=0.05), part


def test_the_parts_add_up_and_allocated_reserved_and_device_memory_differ() -> None:
    model, batch, loss = small_model("gpt")
    sgd = measure_optimizer_cost(
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), multi_tensor=True
    )
    peak = predict_memory(trace_profile(model, batch, loss), Plan(), 64, sgd, CUDA_MEMORY)
    assert sum(peak.breakdown.values()) == peak.allocated_bytes
    assert peak.allocated_bytes <= peak.reserved_bytes < peak.device_bytes
    assert peak.peak_at.startswith("backward of")


def test_buckets_and_accumulated_gradients_count_during_the_whole_step() -> None:
    model, batch, loss = small_model("mnist")
    profile = trace_profile(model, batch, loss, on_gpu=False)
    sgd = measure_optimizer_cost(lambda parameters: torch.optim.SGD(parameters, lr=0.1), multi_tensor=False)

    def peak(**groups: Any) -> Any:
        return predict_memory(profile, Plan.model_validate(groups), 64, sgd, CPU_MEMORY)

    one_rank, replicated = peak(), peak(axes={"replicate": 2})
    assert replicated.breakdown["gradient buckets"] == profile.parameter_bytes
    assert "gradient buckets" not in one_rank.breakdown
    assert replicated.allocated_bytes > one_rank.allocated_bytes
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
def test_the_memory_of_an_optimizer_is_measured_by_running_it(
    make_optimizer: Any, state: float, temporary: float
) -> None:
    cost = measure_optimizer_cost(make_optimizer, multi_tensor=True)
    assert (cost.state_ratio, cost.temporary_ratio) == (state, temporary)


def test_an_optimizer_of_single_tensors_is_counted_operator_by_operator() -> None:
    """The first two operators read and write one tensor each, the third one reads two tensors and writes one."""

    class ThreeOperators(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad + parameter.grad.mul_(2))

    cost = measure_optimizer_cost(ThreeOperators, multi_tensor=True)
    assert (cost.multi_tensor, cost.operators_per_parameter, cost.traffic_ratio) == (False, 3, 2 + 2 + 3)
    assert measure_optimizer_cost(lambda p: torch.optim.AdamW(p), multi_tensor=True).operators_per_parameter == 0


def test_large_tensors_are_rounded_to_their_segment_where_little_is_left() -> None:
    mib = 2**20
    assert DeviceMemory().rounding(12345) == 0
    assert CUDA_MEMORY.rounding(1000) == 24
    assert CUDA_MEMORY.rounding(39.5 * mib) == 0.5 * mib
    assert CUDA_MEMORY.rounding(38.5 * mib) == 0  # the remaining 1.5 MiB serve another tensor


def test_tensors_that_the_caller_keeps_do_not_disturb_tracing() -> None:
    model, (x, y), _ = small_model("mnist")
    outputs: list[Any] = []

    def keep_output(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        outputs[:] = [output]
        return F.cross_entropy(output, target)

    profile = trace_profile(model, (x, y), keep_output, on_gpu=False)
    assert profile.flops(4) == trace_profile(model, (x, y), F.cross_entropy, on_gpu=False).flops(4)
