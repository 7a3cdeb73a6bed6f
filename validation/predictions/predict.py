"""Predicts the step time and the memory of a published case. A model is traced once for all rows that share it."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from meshwright.blocks.recompute import Recompute
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.names import cluster_from_name as named_cluster
from meshwright.files.yaml_file import read_mapping
from meshwright.plan import Plan
from meshwright.planner.inputs import MARGIN
from meshwright.profile.optimizer import OptimizerCost, measure_optimizer_cost
from meshwright.profile.tracing.trace import trace_profile
from meshwright.profile.values import ModelProfile
from meshwright.simulator.memory.peak import MemoryPrediction
from meshwright.simulator.predict import plan_memory
from meshwright.simulator.step import StepTime, predict_step
from meshwright.user.call import Call, load
from validation.engines.engine import Engine, engine_named
from validation.predictions.publisher import without_publisher
from validation.runs.case import PublishedCase, Sample
from validation.runs.models.build import make_batch, make_loss, make_model
from validation.runs.reading.hardware import device_of
from validation.runs.related_sources import publisher

Profiles = Callable[[PublishedCase], ModelProfile]
_NO_STEP = OptimizerCost(state_ratio=0.0, temporary_ratio=0.0, multi_tensor=True)
_COSTS = {
    "SGD": OptimizerCost(1.0, 0.0, multi_tensor=True),
    "AdamW": OptimizerCost(2.0, 0.0, multi_tensor=True),
}
# Assumed: a compiled program replays most operators instead of interpreting them (see engines.yaml).
_COMPILED_LAUNCH = 0.25
_MEGATRON_ENGINES = ("megatron", "megatron-deepspeed", "megatron-deepspeed-waiting")
KERNELS = Path(__file__).parents[1] / "runs" / "kernels.yaml"


@cache
def _kernels() -> dict[str, Any]:
    return read_mapping(KERNELS, "attention kernels")


def generation(cluster: str) -> str:
    """The generation of the cluster's GPUs, such as Hopper; the device's name if kernels.yaml lists no generation."""
    name = device_of(cluster).name
    return next(
        (generation for generation, names in _kernels()["generations"].items() if name.startswith(tuple(names))), name
    )


def _attention_slowdown(case: PublishedCase) -> float:
    """How many times longer the attention kernel of the case's engine takes than that of the reference GPU."""
    kernel = _kernels()["attention"].get(case.engine)
    return float(_kernels()["slower"].get(kernel, {}).get(generation(case.cluster), 1.0))


@dataclass(frozen=True)
class PredictedCase:
    """The predicted seconds of one step of a case, in total and by component (`breakdown`)."""

    case: PublishedCase
    step_s: float
    breakdown: dict[str, float]


def predict_case(case: PublishedCase, profiles: Profiles, launch_factor: float = 1.0) -> PredictedCase:
    """The predicted step time of the case; `launch_factor` multiplies the launch factor of its engine."""
    engine = engine_of(case, launch_factor)
    step = step_of(case, profiles(case), engine)
    return PredictedCase(case, step.step_s, step.breakdown)


def engine_of(case: PublishedCase, launch_factor: float = 1.0) -> Engine:
    """The engine of the case (engines.yaml), changed by what the row states: whether attention writes its scores to
    memory, the precision, and whether the model was compiled. `launch_factor` multiplies the engine's own."""
    engine = engine_named(case.engine)
    changes: dict[str, object] = {
        "launch_factor": engine.launch_factor * launch_factor,
        "attention_slowdown": _attention_slowdown(case),
    }
    if case.attention == "scores":
        changes["writes_scores"] = True
    if case.compiled:
        changes |= {"fused": True, "launch_factor": _COMPILED_LAUNCH * engine.launch_factor * launch_factor}
    if case.plan.numerics.precision in ("bf16", "fp8") and case.engine in _MEGATRON_ENGINES:
        # Megatron-LM: --bf16 turns on --accumulate-allreduce-grads-in-fp32
        changes |= {"gradient_share": 1.0, "accumulate_bytes_per_weight": 10.0}
    if case.plan.axes.expert > 1:
        changes |= {"routed_share": _routed_share(case, engine), "expert_parts": case.plan.axes.tensor}
    if case.engine == "tensorflow-bert" and case.precision == "fp16":
        changes["gradient_share"] = 0.5
    return engine.model_copy(update=changes)


def _routed_share(case: PublishedCase, engine: Engine) -> float:
    """The bytes that are sent to experts, as a share of those of all routed rows in fp32. For k experts on n ranks that
    are as likely as each other, n (1 - (1 - 1/n)^k) different ranks are expected."""
    ranks, choices = case.plan.axes.expert, case.model.arguments["top_k"]
    copies = ranks * (1 - (1 - 1 / ranks) ** choices) if engine.sends_tokens_once else choices
    return copies / choices / (2 if engine.keeps_half_weights(case.precision) else 1)


def fits(case: PublishedCase, profiles: Profiles) -> bool:
    """Whether the case is predicted to fit into the memory of a device, together with the driver's context and the
    margin that the planner keeps free."""
    memory_bytes = cluster_of(case.cluster).nodes[0].device.memory_bytes
    return memory_of(case, profiles(case)).device_bytes <= memory_bytes * (1 - MARGIN)


def memory_of(case: PublishedCase, model_profile: ModelProfile) -> MemoryPrediction:
    """The predicted peak memory of the rank that needs most."""
    cluster, plan = cluster_of(case.cluster, publisher(case.source)), _runnable(case.plan)
    return plan_memory(cluster, model_profile, plan, case.global_batch, _optimizer_cost(case), engine_of(case))


def step_of(case: PublishedCase, model_profile: ModelProfile, engine: Engine) -> StepTime:
    """The predicted step time of the case as this engine runs it."""
    plan = _runnable(case.plan)
    cluster = cluster_of(case.cluster, publisher(case.source))
    batch = case.global_batch / plan.batch_parts
    return predict_step(cluster, model_profile, plan, batch, _optimizer_cost(case), runtime=engine)


def _optimizer_cost(case: PublishedCase) -> OptimizerCost:
    """The cost of the optimizer; zero if the measured step has no optimizer step."""
    if case.optimizer is None:
        return _NO_STEP
    call = case.optimizer
    if call.arguments.get("foreach") is False:
        # The loss scaler of fp16 reads from the device whether gradients are finite, so the host waits for the device.
        return replace(_single_tensor_cost(call.call, **call.arguments), waits_for_device=case.precision == "fp16")
    return _COSTS.get(call.call.rpartition(":")[2]) or _measured_cost(call.call)


@cache
def _measured_cost(optimizer: str) -> OptimizerCost:
    return measure_optimizer_cost(load(optimizer), multi_tensor=True)


@cache
def _single_tensor_cost(optimizer: str, **arguments: Any) -> OptimizerCost:
    return measure_optimizer_cost(partial(load(optimizer), **arguments), multi_tensor=False)


def _runnable(plan: Plan) -> Plan:
    """The plan with the gpipe schedule where 1f1b has fewer microbatches than pipeline ranks. PyTorch refuses such a
    1f1b schedule; both schedules then run the passes in the same order."""
    if plan.pipeline.schedule != "1f1b" or plan.pipeline.microbatches >= plan.axes.pipeline:
        return plan
    return plan.model_copy(update={"pipeline": plan.pipeline.model_copy(update={"schedule": "gpipe"})})


@lru_cache(maxsize=512)
def cluster_of(name: str, left_out: str | None = None) -> Cluster:
    """The cluster of that name, without the sustained rates that the publisher `left_out` measured."""
    cluster = named_cluster(name)
    return cluster if left_out is None else without_publisher(cluster, left_out)


def traced(case: PublishedCase) -> ModelProfile:
    """The profile of the case's model. Rows with the same model, precision and recomputation share one profile."""
    with_structure = case.plan.axes.tensor * case.plan.axes.pipeline > 1
    calls = [case.model.model_dump(), asdict(case.sample), case.loss.model_dump()]
    # Under fp8, operators are those of bf16 until some products are converted (simulator/compute/float8.py).
    precision = "bf16" if case.precision == "fp8" else case.precision
    return _traced(json.dumps(calls, sort_keys=True), precision, case.plan.memory.recompute, with_structure)


@cache
def _traced(calls: str, precision: str, recompute: Recompute, with_structure: bool) -> ModelProfile:
    model_call, sample, loss_call = json.loads(calls)
    with torch.device("meta"):
        model = make_model(Call(**model_call))
        batch = make_batch(Sample(**{**sample, "size": tuple(sample["size"])}), 2)
        criterion = make_loss(Call(**loss_call))
    return trace_profile(
        model, batch, criterion, precision=precision, recompute=recompute, with_structure=with_structure
    )
