"""Chooses the precision of plans with `numerics.precision: auto`: measures steps of the job in fp32 and in the lower
precisions that the device has instructions for, and takes the fastest. A lower precision is not always faster, because
rounding the inputs of small operators can take more time than the faster products save."""

from dataclasses import dataclass

from meshwright.cluster.cluster import Cluster, Device
from meshwright.dtypes import Dtype
from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.train.check import check_job
from meshwright.train.job_parts import JobParts
from meshwright.train.tuning.processes import StepMeasurer
from meshwright.train.tuning.variants import Timing

_CANDIDATES: tuple[Dtype, ...] = ("tf32", "bf16", "fp16")
_TIMEOUT_S = 600.0  # for each precision, most of which a large model takes to be built


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
    plans = [_with_precision(plan, dtype) for dtype in ("fp32", *candidates)]
    with StepMeasurer(job, plan, cluster, ranks=1) as measurer:
        measured = [measurer.measure(candidate, _TIMEOUT_S)[0] for candidate in plans]
    failed = next((timing for timing in measured if timing.step_s is None), None)
    if failed is not None:
        lowest = candidates[-1]
        reason = f"precision {lowest}: steps cannot be measured on one device ({_reason(failed)})"
        return PrecisionChoice(_with_precision(plan, lowest), reason)
    step_s = {
        str(candidate.numerics.precision): timing.step_s
        for candidate, timing in zip(plans, measured, strict=True)
        if timing.step_s is not None
    }
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


def _reason(timing: Timing) -> str:
    return timing.failure or f"they were not measured within {_TIMEOUT_S:.0f} s"


def _with_precision(plan: Plan, precision: str) -> Plan:
    return plan.model_copy(update={"numerics": plan.numerics.model_copy(update={"precision": precision})})
