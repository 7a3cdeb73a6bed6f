"""Chooses the precision of plans with `numerics.precision: auto`: measures steps of the job in fp32 and in the lower
precisions that the device has instructions for, and takes the fastest. A lower precision is not always faster, because
rounding the inputs of small operators can take more time than the faster products save."""

import time
from dataclasses import dataclass
from statistics import median

import torch

from meshwright.cluster.cluster import Cluster, Device
from meshwright.dtypes import Dtype
from meshwright.job import Job
from meshwright.launch.world import World
from meshwright.plan import Plan
from meshwright.train.build import build_data, build_loading
from meshwright.train.check import check_job
from meshwright.train.job_parts import JobParts

_CANDIDATES: tuple[Dtype, ...] = ("tf32", "bf16", "fp16")
_WARM_UP_STEPS, _MEASURED_STEPS = 2, 3


@dataclass(frozen=True)
class PrecisionChoice:
    """A plan that names its precision, and a sentence that says why this precision was chosen. `reason` is empty if the
    plan named its precision before."""

    plan: Plan
    reason: str


def choose_precision(plan: Plan, job: Job, cluster: Cluster, parts: JobParts | None = None) -> PrecisionChoice:
    """Returns the plan with `auto` replaced by the fastest precision. A plan that names a precision is returned
    unchanged. If the model is too large to be measured on one device, the lowest precision that the device has
    instructions for is chosen. `parts` caches what was built of the job before."""
    if plan.numerics.precision != "auto":
        return PrecisionChoice(plan, "")
    # Checked before measuring, so that a mistake in the job is reported in one line.
    check_job(job, _with_precision(plan, "fp32"), cluster, parts)
    device = cluster.nodes[0].device
    candidates = [dtype for dtype in _CANDIDATES if device.accelerates(dtype)]
    if "bf16" in candidates and "fp16" in candidates:
        candidates.remove("fp16")  # bf16 is as fast and needs no loss scale
    if not candidates:
        reason = f"precision fp32: {device.name} has no instructions for bf16 or fp16"
        return PrecisionChoice(_with_precision(plan, "fp32"), reason)
    try:
        step_s = {dtype: _measure(_with_precision(plan, dtype), job, cluster) for dtype in ("fp32", *candidates)}
    except (torch.OutOfMemoryError, MemoryError):
        lowest = candidates[-1]
        reason = f"precision {lowest}: the model is too large for one device to measure it"
        return PrecisionChoice(_with_precision(plan, lowest), reason)
    best = min(step_s, key=lambda dtype: step_s[dtype])
    others = ", ".join(f"{seconds * 1e3:.3g} ms in {dtype}" for dtype, seconds in step_s.items() if dtype != best)
    instructions = f" ({instructions_for(device, best)})" if best != "fp32" else ""
    reason = f"precision {best}{instructions}: {step_s[best] * 1e3:.3g} ms a step, {others}"
    return PrecisionChoice(_with_precision(plan, best), reason)


def instructions_for(device: Device, dtype: str) -> str:
    """Returns the names of the device's matrix instructions for a dtype, joined by commas, or a note that starts with
    `emulated` if it has none."""
    names = [name for name in device.instructions if name.endswith(f"-{dtype}")]
    return ", ".join(names) or f"emulated: {device.name} has no instructions for {dtype}"


def _with_precision(plan: Plan, precision: str) -> Plan:
    return plan.model_copy(update={"numerics": plan.numerics.model_copy(update={"precision": precision})})


def _measure(plan: Plan, job: Job, cluster: Cluster) -> float:
    """Returns the median seconds per step of a single rank, on batches of the size of one microbatch of the plan.
    Communication is not measured, because its time does not depend on the precision."""
    # Imported here, because the import takes a second and only `auto` needs it.
    from meshwright.train.job_session import build_session

    one_rank = Plan(numerics=plan.numerics.model_copy(update={"cast": "operators"}), compute=plan.compute)
    samples = max(1, job.train.global_batch // plan.shares)
    device = torch.device("cuda", 0) if cluster.kind == "cuda" else torch.device("cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(plan.compute.threads or max(1, cluster.cores // plan.world_size))
    try:
        session = build_session(job, one_rank, World(0, 0, 1, 1, 0, device, None), lambda activity: None)
        batches = session.batches(build_data(job)[0], None, samples, build_loading(job, device))
        durations_s = []
        for _ in range(_WARM_UP_STEPS + _MEASURED_STEPS):
            batch = next(batches)
            began = time.perf_counter()
            float(session.step(batch))  # reading the loss waits for the device
            durations_s.append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    return median(durations_s[_WARM_UP_STEPS:])
