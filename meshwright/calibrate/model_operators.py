"""Measures the operators of one model, in the model's shapes, on the machine that will train it. The general
calibration of a device has measured other shapes, between which predictions interpolate. Once the measurements of this
module are added to it (one `OperatorTime` each, called a row), a look-up finds the exact shape.

    machine     only a cluster that is this machine, measured as `local`, gets new rows           is_this_machine
    operators   the distinct operators that one rank runs under a plan, those with the longest
                predicted time first, as many as the time budget allows                           _slowest_operators
    one pass    runs them in the order of the step with as many threads as the rank has, while
                the other ranks of this machine do the same; forward results are saved until
                the backward pass reads them                                                      _run_pass
    passes      all ranks begin a pass together, and it lasts until the slowest rank has ended    _time_on_cores
    rows        the median over the passes as `OperatorTime` of one core: seconds × threads       _row

An operator that fails here is not measured (`_result`), because its arguments are reconstructed from the profile, and
may differ from those of the model. It keeps the time that the calibration of the device predicts.

An operator that is timed alone in a loop finds its memory allocated and its inputs in the cache. In a training step,
inputs may have left the cache, and memory has to be allocated, which takes time. On two cores of a server, convolutions
timed in a loop appeared up to twice as slow or twice as fast as they are in a step. What is in memory while an operator
runs matters, too: while gradients were kept that a step frees, later results got new memory, and the MNIST net with 64
samples appeared to take 197 ms on two Neoverse-N1 cores instead of 170.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from meshwright.calibrate.operator_calls import CallBuilder, OperatorCall, TensorPool
from meshwright.calibrate.timing import device_seconds
from meshwright.cluster.busy import OtherPrograms, is_idle_now
from meshwright.cluster.cache import OperatorSeconds, load_operator_seconds, save_operator_seconds
from meshwright.cluster.cluster import Cluster, Device, Node, OperatorTime
from meshwright.cluster.detect import detect, detect_cpu
from meshwright.dtypes import DTYPE_NAMES, Dtype, float32_matmul_precision
from meshwright.plan import Plan
from meshwright.profile.values import ModelProfile, Operator
from meshwright.simulator.compute.executed_profile import executed_profile
from meshwright.simulator.compute.lookup import (
    OperatorClass,
    classify_measurement,
    classify_operator,
    with_measured_rows,
)
from meshwright.simulator.compute.operator_time import DeviceSpeeds, device_speeds, operator_s
from meshwright.simulator.compute.passes import product_dtype
from meshwright.simulator.tensor.branches import plan_outside_branches, without_branch_splits
from meshwright.simulator.tensor.split_profile import split_profile
from meshwright.simulator.tensor.standalone_splits import with_standalone_splits

BASED_ON = "measured here, with the model's own shapes"
BUDGET_S = 3.0
MOST_PASSES, FEWEST_PASSES = 9, 3
SMALLEST_STEP_SHARE = 2e-3  # operators that take a smaller share of the step get no row
_MEMORY_SHARE = 0.25  # of a device's memory, which inputs and results of all calls together may take
_IMAGE_OPERATORS = ("convolution", "batch_norm", "pooling")


@dataclass(frozen=True)
class _CallToTime:
    """An operator of the step, the key under which its time is looked up, and the call that runs it."""

    operator: Operator
    backward: bool
    lookup: OperatorClass
    call: OperatorCall


@dataclass(frozen=True)
class _Rank:
    """How the plan runs one rank on this machine, which runs `ranks` of them at the same time. A CPU rank has `cores`
    devices of one core each. `layout` is `compute.image_kernels` of the plan. With `tf32`, fp32 products round their
    inputs to tf32."""

    device: Device
    cores: int
    ranks: int
    layout: str
    speeds: DeviceSpeeds
    tf32: bool

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device.kind)

    def make_pool(self) -> TensorPool:
        return TensorPool(self.torch_device, channels_last=self.layout == "channels_last")


def measure_model_operators(
    cluster: Cluster, profile: ModelProfile, plan: Plan, global_batch: int, budget_s: float = BUDGET_S
) -> Cluster:
    """Returns the cluster with measured times of the operators that one rank runs under this plan, or the same cluster
    if it is not this machine. This takes about `budget_s` seconds the first time. The times are stored until this
    machine is measured again, so that the same model gets the same plan. The states of the random number generators and
    the number of threads are restored afterwards."""
    if not is_this_machine(cluster):
        return cluster
    (node,) = cluster.nodes
    batch = max(1, round(global_batch / plan.batch_parts))
    executed = executed_profile(with_standalone_splits(profile, plan))
    # The profile contains the branches of all ranks, because the operators of every branch are measured.
    rank_profile = split_profile(without_branch_splits(executed, plan), plan_outside_branches(executed, plan))
    rank = _rank(node, plan)
    calls = _slowest_operators(rank_profile, batch, rank, budget_s)
    if not calls:
        return cluster
    measured = _seconds_of(calls, rank, node, batch, budget_s)
    rows = tuple(_rows(calls, measured.seconds, batch, rank))
    if not rows:
        return cluster
    device = node.device.model_copy(
        update={
            "operators": with_measured_rows(node.device.operators, rows),
            "sources": {**node.device.sources, "operators": BASED_ON},
        }
    )
    return cluster.model_copy(
        update={
            "nodes": (node.model_copy(update={"device": device}),),
            "based_on": BASED_ON,
            "busy_cores": max(cluster.busy_cores, measured.busy_cores),
        }
    )


def is_this_machine(cluster: Cluster) -> bool:
    """Whether the cluster is this machine and has measured operators to which new measurements can be added. The
    cluster's name must be that of a local cluster, and its processor or GPU and its number of cores must agree with
    those detected on this machine."""
    node = cluster.nodes[0]
    is_local = cluster.name == "local" or cluster.name.lower().endswith("cpu")
    if not is_local or cluster.based_on in ("detected", "datasheet") or len(cluster.nodes) > 1 or node.number > 1:
        return False
    if not node.device.operators or (node.device.kind == "cuda" and not torch.cuda.is_available()):
        return False
    (detected,) = (detect() if node.device.kind == "cuda" else detect_cpu()).nodes
    return detected.device.name == node.device.name and detected.cores == node.cores


def _rank(node: Node, plan: Plan) -> _Rank:
    ranks, cores = min(plan.world_size, node.count), 1
    if node.device.kind == "cpu":
        cores = plan.compute.threads or max(1, node.cores // ranks)
    precision, layout = plan.numerics.precision, plan.compute.image_kernels
    rank_speeds = device_speeds(node.device, product_dtype(precision), cores, layout)
    return _Rank(node.device, cores, ranks, layout, rank_speeds, precision == "tf32")


# ---- which operators are timed


def _slowest_operators(profile: ModelProfile, batch: int, rank: _Rank, budget_s: float) -> list[_CallToTime]:
    """Returns the operators to time, in the order of the step: those with the longest predicted total time, as many as
    the time budget and the memory of a rank allow."""
    builder = CallBuilder(batch, fuses_bias=rank.device.kind == "cpu", uses_nnpack=rank.layout == "nnpack")
    # By look-up key: the call, the predicted seconds of one call, and those of all equal calls in a step.
    candidates: dict[tuple[object, ...], tuple[_CallToTime, float, float]] = {}
    for segment in profile.segments:
        backward = segment.phase == "backward"
        for operator in segment.operators:
            lookup = classify_operator(operator, batch, 1.0, backward)
            call = _build(builder, operator, backward) if lookup else None
            if lookup is None or call is None:
                continue
            key: tuple[object, ...] = (lookup, backward, operator.name, operator.dtype)
            call_s = operator_s(operator, batch, rank.speeds, backward, rank.tf32)
            first, _, total = candidates.get(key, (_CallToTime(operator, backward, lookup, call), call_s, 0.0))
            candidates[key] = (first, call_s, total + segment.block_count * call_s)
    step_s = sum(total for *_, total in candidates.values())
    remaining_s, remaining_bytes = budget_s / (FEWEST_PASSES + 1), _MEMORY_SHARE * rank.device.memory_bytes
    affordable: set[tuple[object, ...]] = set()
    for key, (candidate, call_s, total) in sorted(candidates.items(), key=lambda item: -item[1][2]):
        if total < SMALLEST_STEP_SHARE * step_s:
            break
        if call_s <= remaining_s and candidate.lookup.bytes <= remaining_bytes:
            remaining_s, remaining_bytes = remaining_s - call_s, remaining_bytes - candidate.lookup.bytes
            affordable.add(key)
    return [candidate for key, (candidate, *_) in candidates.items() if key in affordable]


def _build(builder: CallBuilder, operator: Operator, backward: bool) -> OperatorCall | None:
    try:
        return builder.build(operator, backward)
    except Exception:  # shapes that no operator of this name has
        return None


# ---- how long they take

_Seconds = list[float | None]  # of each call; None for a call that fails


def _seconds_of(calls: Sequence[_CallToTime], rank: _Rank, node: Node, batch: int, budget_s: float) -> OperatorSeconds:
    """Returns the seconds of each call, as they were measured before if they were. What other programs disturbed is
    measured again once they have ended."""
    keys = [(timed.lookup, timed.backward, timed.operator.name, timed.operator.dtype) for timed in calls]
    inputs = (node.model_dump_json(), batch, rank.cores, rank.ranks, rank.layout, rank.tf32, *keys)
    known = load_operator_seconds(inputs, len(calls))
    if known is not None and not (known.busy_cores and is_idle_now()):
        return known
    others, is_gpu = OtherPrograms(), node.device.kind == "cuda"
    seconds = _time_on_gpu(calls, rank) if is_gpu else _time_on_cores(calls, rank, budget_s)
    measured = OperatorSeconds(seconds, others.cores())
    save_operator_seconds(inputs, measured)
    return measured


def _time_on_gpu(calls: Sequence[_CallToTime], rank: _Rank) -> _Seconds:
    """Returns the seconds of each call."""
    pool = rank.make_pool()
    seconds: _Seconds = []
    with torch.random.fork_rng(), torch.no_grad():
        for timed in calls:
            with float32_matmul_precision(_dtype(timed.operator, rank)):
                run = partial(timed.call, pool)
                runs = _result(timed, pool) is not None
                seconds.append(device_seconds([run], rank.torch_device, 0.01) if runs else None)
    return seconds


def _time_on_cores(calls: Sequence[_CallToTime], rank: _Rank, budget_s: float) -> _Seconds:
    """Returns the seconds of each call: the median over several passes, after a first pass that warms up. All ranks of
    this machine begin a pass together. The times of a pass are scaled to the length of the slowest rank's pass, because
    a training step waits for all ranks."""
    threads_before, end = torch.get_num_threads(), time.perf_counter() + budget_s
    barrier, finished = threading.Barrier(rank.ranks), threading.Event()
    neighbours = [_NeighbourRank(calls, rank, barrier, finished) for _ in range(rank.ranks - 1)]
    passes: list[_Seconds] = []
    try:
        torch.set_num_threads(rank.cores)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            pool = _warm_pool(calls, rank)
            for neighbour in neighbours:
                neighbour.start()
            while len(passes) < FEWEST_PASSES or (len(passes) < MOST_PASSES and time.perf_counter() < end):
                barrier.wait()
                passes.append(_run_pass(calls, pool))
                barrier.wait()  # `finished` may be set only after every rank has ended this pass
            finished.set()
            barrier.wait()
    finally:
        if not finished.is_set():
            finished.set()
            barrier.abort()
        for neighbour in neighbours:
            if neighbour.is_alive():
                neighbour.join()
        torch.set_num_threads(threads_before)
    pass_totals = zip(map(_total, passes), *(neighbour.pass_seconds for neighbour in neighbours), strict=True)
    scales = [max(totals) / (totals[0] or 1.0) for totals in pass_totals]
    measured = [[s for s in call_s if s is not None] for call_s in zip(*passes, strict=True)]
    return [
        median(s * scale for s, scale in zip(call_s, scales, strict=True)) if len(call_s) == len(passes) else None
        for call_s in measured
    ]


def _total(seconds: _Seconds) -> float:
    return sum(s for s in seconds if s is not None)


class _NeighbourRank(threading.Thread):
    """A thread that acts as another rank of this machine: it runs the same calls at the same time, with as many CPU
    threads as a rank has. `pass_seconds` are the seconds of each of its passes."""

    def __init__(
        self, calls: Sequence[_CallToTime], rank: _Rank, barrier: threading.Barrier, finished: threading.Event
    ) -> None:
        super().__init__(daemon=True)
        self._calls, self._rank, self._barrier, self._finished = calls, rank, barrier, finished
        self.pass_seconds: list[float] = []

    def run(self) -> None:
        torch.set_num_threads(self._rank.cores)
        try:
            with torch.no_grad():
                pool = _warm_pool(self._calls, self._rank)
                while True:
                    self._barrier.wait()
                    if self._finished.is_set():
                        return
                    self.pass_seconds.append(_total(_run_pass(self._calls, pool)))
                    self._barrier.wait()
        except BaseException:
            self._barrier.abort()  # otherwise the other ranks would wait for this one forever
            raise


def _warm_pool(calls: Sequence[_CallToTime], rank: _Rank) -> TensorPool:
    """Returns the tensors of a rank after a first pass, which generates the inputs and is not timed."""
    pool = rank.make_pool()
    _run_pass(calls, pool)
    pool.reallocate_generated()
    return pool


def _result(timed: _CallToTime, pool: TensorPool) -> torch.Tensor | None:
    """Returns the result of a call, or None if it fails."""
    try:
        return timed.call(pool)
    except Exception:
        return None


def _run_pass(calls: Sequence[_CallToTime], pool: TensorPool) -> _Seconds:
    """Runs the calls once in their order. Returns the seconds of each call, including the time to free tensors that are
    no longer needed after it."""
    activations = pool.saved_activations
    backward_calls = sum(timed.backward for timed in calls)
    forward_calls, backward_done = len(calls) - backward_calls, 0
    seconds: _Seconds = []
    start = time.perf_counter()
    for number, timed in enumerate(calls, 1):
        result = _result(timed, pool)
        runs = result is not None
        if result is not None:
            pool.store(result, timed.backward)
        if timed.backward:
            backward_done += 1
            del activations[round(forward_calls * (1 - backward_done / backward_calls)) :]
        elif result is None:
            pass
        elif timed.operator.name.startswith("relu") and activations:
            activations[-1] = result  # the backward pass of a ReLU needs its result only, not its input
        else:
            activations.append(result)
        del result
        if number == len(calls):
            pool.clear()
        now = time.perf_counter()
        seconds.append(now - start if runs else None)
        start = now
    return seconds


# ---- the measured rows


def _dtype(operator: Operator, rank: _Rank) -> Dtype:
    """Returns the dtype under which `simulator/compute/operator_time.py` looks the operator up."""
    dtype = DTYPE_NAMES.get(operator.dtype, "fp32")
    is_product = operator.kind in ("convolution", "matmul", "attention")
    return "tf32" if dtype == "fp32" and rank.tf32 and is_product and "tf32" in rank.speeds.rates else dtype


def _rows(calls: Sequence[_CallToTime], seconds: _Seconds, batch: int, rank: _Rank) -> Iterator[OperatorTime]:
    """Yields one `OperatorTime` for all calls with the same look-up key. Its seconds are the mean over these calls,
    multiplied by the number of cores, because a device of a CPU rank is one core."""
    rows: dict[object, tuple[OperatorTime, list[float]]] = {}
    for timed, call_s in zip(calls, seconds, strict=True):
        if call_s is None:
            continue
        row = _row(timed, call_s, batch, rank)
        key = (row.direction, row.dtype, row.layout, *classify_measurement(row))
        rows.setdefault(key, (row, []))[1].append(call_s * rank.cores)
    for row, core_seconds in rows.values():
        yield row.model_copy(update={"seconds": sum(core_seconds) / len(core_seconds)})


def _row(timed: _CallToTime, seconds: float, batch: int, rank: _Rank) -> OperatorTime:
    lookup, name = timed.lookup, timed.lookup.name
    sizes = [max(1, round(size.at(batch))) for size in timed.operator.shape]
    if name.startswith("matmul"):
        # Products with an unaligned side are classes of their own, named after that side ("matmul n"). All other sides
        # are rounded up to a multiple of eight, so that `classify_measurement` finds the class of `timed.lookup`.
        sizes = [
            size if name.endswith(side) else -(-size // 8) * 8 for side, size in zip("mnk", sizes[1:], strict=True)
        ]
    elif name == "grouped_matmul":
        sizes = [max(1, round(2**size)) for size in lookup.sizes]
    elif name.endswith("_gradient"):
        sizes = sizes[1:]
    elif name == "attention":
        sizes = [*sizes[:3], sizes[4]]
    elif name == "batch_norm":
        sizes = [1, max(1, round(2 ** lookup.sizes[1])), 1, 1]
    elif name not in ("batched_matmul", "convolution"):
        sizes = sizes[:1]
    return OperatorTime.model_validate(
        {
            "operator": "norm" if name == "batch_norm" else name.partition(" ")[0],
            "direction": "backward" if timed.backward else "forward",
            "dtype": _dtype(timed.operator, rank),
            "shape": sizes,
            "layout": rank.layout if name in _IMAGE_OPERATORS else "contiguous",
            "flops": lookup.flops,
            "bytes": lookup.bytes,
            "seconds": seconds,
        }
    )
