"""A published case, predicted: its model traced once for all rows that share it, its engine found by name."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from meshwright.blocks.recompute import Recompute
from meshwright.call import Call, load
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.names import named as named_cluster
from meshwright.plan import Plan
from meshwright.planner.question import MARGIN
from meshwright.profile.optimizer import OptimizerCost, optimizer_cost
from meshwright.profile.tracing.trace import profile
from meshwright.profile.values import ModelProfile
from meshwright.simulator.engine import Engine, find_engine
from meshwright.simulator.memory.engine_memory import engine_memory
from meshwright.simulator.predict import device_memory
from meshwright.simulator.step import StepTime, predict_step
from meshwright.yaml_file import read_mapping
from validation.runs.case import Case, Sample
from validation.runs.kin import publisher
from validation.runs.models.build import make_batch, make_loss, make_model
from validation.runs.reading.hardware import device_of

Profiles = Callable[[Case], ModelProfile]
_NO_STEP = OptimizerCost(state=0.0, temporary=0.0, at_once=True)
_COSTS = {
    "SGD": OptimizerCost(1.0, 0.0, at_once=True),
    "AdamW": OptimizerCost(2.0, 0.0, at_once=True),
}
_MEGATRONS = ("megatron", "megatron-deepspeed", "megatron-deepspeed-waiting")
KERNELS = Path(__file__).parents[1] / "runs" / "kernels.yaml"


@cache
def _kernels() -> dict[str, Any]:
    return read_mapping(KERNELS, "attention kernels")


def generation(cluster: str) -> str:
    """Of the GPUs of a cluster."""
    name = device_of(cluster).name
    return next((made for made, names in _kernels()["generations"].items() if name.startswith(tuple(names))), name)


def _slower_attention(case: Case) -> float:
    kernel = _kernels()["attention"].get(case.engine)
    return float(_kernels()["slower"].get(kernel, {}).get(generation(case.cluster), 1.0))


@dataclass(frozen=True)
class Predicted:
    """Seconds, and what they are spent on."""

    case: Case
    step_s: float
    breakdown: dict[str, float]


def predict_case(case: Case, profiles: Profiles, launch: float = 1.0) -> Predicted:
    """`launch` multiplies the engine's own."""
    engine = engine_of(case, launch)
    step = step_of(case, profiles(case), engine)
    return Predicted(case, step.step_s, step.breakdown)


def engine_of(case: Case, launch: float = 1.0) -> Engine:
    """As engines.yaml has it, with what the row says: whether scores are written out, and whether it was compiled."""
    named = find_engine(case.engine)
    told: dict[str, object] = {"launch": named.launch * launch}
    if case.attention == "scores":
        told["scores"] = True
    told["attention"] = _slower_attention(case)
    if case.compiled:
        told |= {"fused": True, "launch": 0.25 * named.launch * launch}
    if case.plan.numerics.precision == "bf16" and case.engine in _MEGATRONS:
        told |= {
            "gradient": 1.0,
            "accumulate_bytes_per_weight": 10.0,
        }  # --bf16 turns on --accumulate-allreduce-grads-in-fp32
    if case.engine == "tensorflow-bert" and case.precision == "fp16":
        told["gradient"] = 0.5
    return named.model_copy(update=told)


def fits(case: Case, profiles: Profiles) -> bool:
    """Whether a rank's memory holds it, with the driver's context and the margin that the planner keeps free."""
    cluster, plan = cluster_of(case.cluster, publisher(case.source)), _runnable(case.plan)
    batch = -(-case.global_batch // plan.shares)
    found = engine_memory(profiles(case), plan, batch, _cost(case), device_memory(cluster), engine_of(case))
    return found.device_bytes <= cluster.nodes[0].device.memory_bytes * (1 - MARGIN)


def step_of(case: Case, found: ModelProfile, engine: Engine) -> StepTime:
    plan = _runnable(case.plan)
    cluster = cluster_of(case.cluster, publisher(case.source))
    return predict_step(cluster, found, plan, case.global_batch / plan.shares, _cost(case), engine)


def _cost(case: Case) -> OptimizerCost:
    if case.optimizer is None:
        return _NO_STEP
    call = case.optimizer
    if call.arguments.get("foreach") is False:
        # A scaler of losses asks the device whether gradients were finite; without one the host runs ahead.
        return replace(_by_tensor(call.call, **call.arguments), waits=case.precision == "fp16")
    return _COSTS.get(call.call.rpartition(":")[2]) or _found_cost(call.call)


@cache
def _found_cost(optimizer: str) -> OptimizerCost:
    return optimizer_cost(load(optimizer), at_once=True)


@cache
def _by_tensor(optimizer: str, **arguments: Any) -> OptimizerCost:
    return optimizer_cost(partial(load(optimizer), **arguments), at_once=False)


def _runnable(plan: Plan) -> Plan:
    """PyTorch's 1F1B wants as many microbatches as ranks; with fewer it would be GPipe."""
    if plan.pipeline.schedule != "1f1b" or plan.pipeline.microbatches >= plan.axes.pipeline:
        return plan
    return plan.model_copy(update={"pipeline": plan.pipeline.model_copy(update={"schedule": "gpipe"})})


@lru_cache(maxsize=512)
def cluster_of(name: str, without: str | None = None) -> Cluster:
    """Without what a publisher measured of its GPUs."""
    found = named_cluster(name)
    if without is None:
        return found
    nodes = []
    for node in found.nodes:
        device = node.device.model_copy(update={"sources": {**node.device.sources, "without": without}})
        nodes.append(node.model_copy(update={"device": device}))
    return found.model_copy(update={"nodes": tuple(nodes)})


def traced(case: Case) -> ModelProfile:
    """One for all rows of a model, precision and recomputation."""
    split = case.plan.axes.tensor * case.plan.axes.pipeline > 1
    what = [case.model.model_dump(), asdict(case.sample), case.loss.model_dump()]
    return _traced(json.dumps(what, sort_keys=True), case.precision, case.plan.memory.recompute, split)


@cache
def _traced(what: str, precision: str, recompute: Recompute, structured: bool) -> ModelProfile:
    model, sample, loss = json.loads(what)
    with torch.device("meta"):
        made = make_model(Call(**model))
        batch = make_batch(Sample(**{**sample, "size": tuple(sample["size"])}), 2)
        criterion = make_loss(Call(**loss))
    return profile(made, batch, criterion, precision=precision, recompute=recompute, structured=structured)
