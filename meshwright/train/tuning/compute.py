"""Tuning: measures which `compute` fields of a plan make the steps of a job faster on this machine.

Starting from the plan, one change after another is tried (`_changes`), and kept if it makes steps faster. Tuning may
take a small share of the run. A run that is too short to earn it back is not tuned. The result is kept in the user's
cache folder, for the next run of the same job on the same device.
"""

import hashlib
import json
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.cluster.cluster import Cluster
from meshwright.errors import StorageError
from meshwright.files.cache import cache_folder
from meshwright.files.storage import write_atomically, writing
from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Compute
from meshwright.progress import phase
from meshwright.train.job_parts import JobParts
from meshwright.train.tuning.measure import MeasuredSteps, StepMeasurer

_SHARE_OF_RUN = 0.05  # tuning takes at most this share of the run's predicted time
_LEAST_BUDGET_S = 5.0  # starting the measuring process and measuring one plan takes about as long
_LEAST_GAIN = 0.03  # measured steps differ by about as much from one measurement to the next
# Measured on the host of an H200: VGG16 15 s, ResNet-50 55 s, GPT-2 with 48 blocks 145 s.
_COMPILE_S, _COMPILE_S_PER_LAYER = 10.0, 0.3


@dataclass(frozen=True)
class Tuning:
    """The plan with the `compute` fields that were measured to be the fastest, and a sentence that says what was
    measured."""

    plan: Plan
    reason: str


def tune(
    plan: Plan,
    parts: JobParts,
    cluster: Cluster,
    step_s: float | None,
    notify: Callable[[str], None],
) -> Tuning | None:
    """Tunes the `compute` fields of a plan. `step_s` are the predicted seconds of a step; None if they are not known.
    Returns None if the run is too short to be tuned, if its length is not known, or if its steps cannot be measured.
    `notify` is called with a line before each measurement."""
    steps = _steps_of(parts)
    if steps is None or step_s is None:
        return None
    file = cache_folder() / "tuning" / f"{_key(plan, parts, cluster)}.json"
    known = _load(file)
    if known is not None:
        tuned = plan.model_copy(update={"compute": known})
        reason = f"tuned as in an earlier run of this job: {tuned.summary()}"
        return Tuning(tuned, reason) if known != plan.compute else None
    budget_s = _SHARE_OF_RUN * steps * step_s
    if budget_s < _LEAST_BUDGET_S:
        return None
    with StepMeasurer(parts.job, plan, cluster) as measurer:
        return _Search(plan, parts.model, cluster, steps, budget_s, measurer, notify).run(file)


def _steps_of(parts: JobParts) -> int | None:
    """The number of steps of a run; None if the job counts epochs of a stream."""
    train, data = parts.job.train, parts.data[0]
    if train.epochs is None or not hasattr(data, "__len__"):
        return train.steps
    in_epochs = train.epochs * -(-len(data) // train.global_batch)
    return min(in_epochs, train.steps or in_epochs)


@dataclass
class _Search:
    """The search for the fastest `compute` fields of `plan`, in a run of this many `steps`. It may take `budget_s`
    seconds."""

    plan: Plan
    model: nn.Module
    cluster: Cluster
    steps: int
    budget_s: float
    measurer: StepMeasurer
    notify: Callable[[str], None]
    begin: float = field(default_factory=time.perf_counter)

    def run(self, file: Path) -> Tuning | None:
        """Returns the result, and keeps it in `file`; None if the plan as it is cannot be measured."""
        first = self._measure(self.plan, "the plan as it is")
        if first is None:
            return None
        self.budget_s = min(self.budget_s, _SHARE_OF_RUN * self.steps * first.step_s)
        best, best_plan, was_cut_short = first, self.plan, False
        for name, change, ready_s in _changes(self.plan, self.model, self.cluster):
            if self._spent_s + ready_s > self.budget_s:
                was_cut_short = True
                continue
            candidate = best_plan.model_copy(update={"compute": best_plan.compute.model_copy(update=change)})
            measured = self._measure(candidate, name, ready_s)
            if measured is not None and measured.step_s < (1 - _LEAST_GAIN) * best.step_s:
                best, best_plan = measured, candidate
        if not was_cut_short:  # a longer run would measure more
            _save(file, best_plan.compute)
        gain_s = first.step_s - best.step_s
        if best_plan is self.plan:
            return Tuning(self.plan, f"tuning took {self._spent_s:.0f} s and found nothing faster")
        return Tuning(
            best_plan,
            f"tuned to {best_plan.summary()} in {self._spent_s:.0f} s: {best.step_s * 1e3:.3g} ms of compute a step"
            f" instead of {first.step_s * 1e3:.3g} ms, paid back after {self._spent_s / gain_s:,.0f} of"
            f" {self.steps:,} steps",
        )

    @property
    def _spent_s(self) -> float:
        return time.perf_counter() - self.begin

    def _measure(self, plan: Plan, name: str, ready_s: float = _LEAST_BUDGET_S) -> MeasuredSteps | None:
        self.notify(f"tuning: measuring {name}")
        with phase(f"tuning: measuring {name}", ready_s):
            result = self.measurer.measure(plan, max(_LEAST_BUDGET_S, 4 * (self.budget_s - self._spent_s)))
        if isinstance(result, str):
            self.notify(f"tuning: {name} is left out: {result}")
            return None
        return result


def _changes(plan: Plan, model: nn.Module, cluster: Cluster) -> Iterator[tuple[str, dict[str, Any], float]]:
    """The changes to try, the cheapest first: a name, the fields of `compute` and the expected seconds until steps can
    be measured."""
    compute, on_gpu = plan.compute, cluster.kind == "cuda"
    if not compute.fused_optimizer:
        yield "a fused optimizer", {"fused_optimizer": True}, 1.0
    has_images = any(parameter.dim() == 4 for parameter in model.parameters())
    if has_images and compute.layout == "contiguous":
        yield "channels_last", {"layout": "channels_last", "convolutions": "default"}, 1.0
    if has_images and not on_gpu and plan.numerics.precision == "fp32" and compute.convolutions == "default":
        yield "NNPACK's convolutions", {"layout": "contiguous", "convolutions": "nnpack"}, 1.0
    if on_gpu and plan.processes == 1 and not compute.cuda_graphs:
        yield "CUDA graphs", {"cuda_graphs": True}, 2.0
    if not plan.compile_obstacle and compute.compile == "none":
        layers = sum(not any(True for _ in module.children()) for module in model.modules())
        kind = "model" if plan.axes.shard == plan.axes.tensor == 1 else "blocks"
        ready_s = _COMPILE_S + _COMPILE_S_PER_LAYER * layers
        yield "a compiled model", {"compile": kind, "convolutions": "default"}, ready_s


# ---- results of earlier runs


def _key(plan: Plan, parts: JobParts, cluster: Cluster) -> str:
    """What the result depends on: the job's calls, the shapes of the weights, the rest of the plan, the device and the
    version of torch."""
    job: Job = parts.job
    dumped = job.model_dump(mode="json")
    weights = [(name, str(p.dtype), tuple(p.shape)) for name, p in parts.model.named_parameters()]
    device = cluster.nodes[0].device.name, cluster.cores
    asked = [dumped[name] for name in ("model", "loss", "optimizer", "data")], job.train.global_batch
    text = json.dumps([plan.model_dump(mode="json"), weights, asked, device, torch.__version__], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _load(file: Path) -> Compute | None:
    try:
        return Compute.model_validate_json(file.read_text())
    except (OSError, ValueError):
        return None


def _save(file: Path, compute: Compute) -> None:
    try:
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, compute.model_dump_json())
    except StorageError as error:
        warnings.warn(f"{error}; until then every run is tuned", stacklevel=2)
