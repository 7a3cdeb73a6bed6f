"""`numerics.precision: auto`: the fastest precision that this hardware has instructions for, by measuring steps of the
job itself. Lower ones are not always faster: small shapes spend more on rounding their inputs than they save."""

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
from meshwright.train.check import check

_LOWER: tuple[Dtype, ...] = ("tf32", "bf16", "fp16")
_WARM_UP, _STEPS = 2, 3


@dataclass(frozen=True)
class Chosen:
    """The plan with a precision, and the sentence that says why."""

    plan: Plan
    why: str


def choose_precision(plan: Plan, job: Job, cluster: Cluster) -> Chosen:
    """A plan that names its precision is left as it is."""
    if plan.numerics.precision != "auto":
        return Chosen(plan, "")
    check(job, _in(plan, "fp32"), cluster)  # whatever is wrong with the job is said in one line
    device = cluster.nodes[0].device
    able = [dtype for dtype in _LOWER if device.accelerates(dtype)]
    if "bf16" in able and "fp16" in able:
        able.remove("fp16")  # as fast, and with a range so small that losses have to be scaled
    if not able:
        return Chosen(_in(plan, "fp32"), f"precision fp32: {device.name} has no instructions for bf16 or fp16")
    try:
        seconds = {dtype: _measure(_in(plan, dtype), job, cluster) for dtype in ("fp32", *able)}
    except (torch.OutOfMemoryError, MemoryError):
        return Chosen(_in(plan, able[-1]), f"precision {able[-1]}: the model is too large for one device to measure it")
    best = min(seconds, key=lambda dtype: seconds[dtype])
    others = ", ".join(f"{taken * 1e3:.3g} ms in {dtype}" for dtype, taken in seconds.items() if dtype != best)
    with_ = f" ({instructions_for(device, best)})" if best != "fp32" else ""
    return Chosen(_in(plan, best), f"precision {best}{with_}: {seconds[best] * 1e3:.3g} ms a step, {others}")


def instructions_for(device: Device, dtype: str) -> str:
    """What a type's products run on, or that they would be emulated."""
    found = [name for name in device.instructions if name.endswith(f"-{dtype}")]
    return ", ".join(found) or f"emulated: {device.name} has no instructions for {dtype}"


def _in(plan: Plan, precision: str) -> Plan:
    return plan.model_copy(update={"numerics": plan.numerics.model_copy(update={"precision": precision})})


def _measure(plan: Plan, job: Job, cluster: Cluster) -> float:
    """Seconds of a step of one rank's microbatch, alone: what ranks exchange is the same in every precision."""
    from meshwright.train.job_session import build_session  # only here a launcher needs the engine

    alone = Plan(numerics=plan.numerics.model_copy(update={"cast": "operators"}), compute=plan.compute)
    batch = max(1, job.train.global_batch // plan.shares)
    device = torch.device("cuda", 0) if cluster.kind == "cuda" else torch.device("cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(plan.compute.threads or max(1, cluster.cores // plan.world_size))
    try:
        session = build_session(job, alone, World(0, 0, 1, 1, 0, device, None), lambda doing: None)
        batches = session.batches(build_data(job)[0], None, batch, build_loading(job, device))
        taken = []
        for _ in range(_WARM_UP + _STEPS):
            one = next(batches)
            began = time.perf_counter()
            float(session.step(one))  # waits for the device
            taken.append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    return median(taken[_WARM_UP:])
