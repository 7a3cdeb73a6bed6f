"""`meshwright bench strategies`: trains the same global batches with every strategy, in alternating rounds, and
compares speed, loss, memory and communication with one device."""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TypeVar

from torch import nn

from meshwright.bench import figures
from meshwright.bench.strategies.catalog import ALL_CORES, AUTO, DATA_PARALLEL, ON_ONE_DEVICE, PLAIN, SINGLE
from meshwright.bench.strategies.data_parallel import predict_data_parallel
from meshwright.bench.strategies.measure import Measurement, RunnableStrategy, Steps
from meshwright.bench.strategies.plans import NEEDS_SEVERAL_DEVICES, StrategyPlanner
from meshwright.bench.strategies.request import Loop
from meshwright.bench.strategies.rows import SkippedStrategy, StrategyReport, StrategyRow
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import check_is_local
from meshwright.errors import InputError, MeshwrightError, Stopped
from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.progress import phase
from meshwright.simulator.predict import Prediction
from meshwright.train.check import check_job
from meshwright.train.job_parts import JobParts
from meshwright.train.torch_private import AnyBatchNorm

# The loss after a few steps, relative: what the order of sums and the precision change. In fp32, mnist, vgg16 and gpt
# on two ranks differed by at most 2e-6; the tolerances of other precisions are not based on measurements.
LOSS_TOLERANCES = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 3e-2, "fp16": 3e-2, "fp8": 1e-1}
_MEASURED_S = 0.8  # how long the timed steps of the single device take, if the number of steps is not given
_MOST_STEPS, _FEWEST_WITH_RECORD = {"cpu": 20, "cuda": 50}, 3
# A GPU captures CUDA graphs in the fourth step, and loads kernels in the first.
_PROBE = {"cpu": Steps(warm_up=1, timed=1, sampled=0), "cuda": Steps(warm_up=3, timed=5, sampled=0)}
_GPU_WARM_UP = 5
_SLOW_STEP_S = 0.3  # a job with longer steps gets one step of warm-up, else two
Value = TypeVar("Value")


@dataclass(frozen=True)
class Settings:
    """What is compared, and how long. `steps` is None if it is chosen from the speed of the single device. No round
    begins if it would probably end after `limit_s`."""

    strategies: Sequence[str]
    precisions: Sequence[str]
    steps: int | None
    rounds: int
    limit_s: float


@dataclass
class _Contestant:
    """A strategy on a number of devices, in a precision: how it is run, what is predicted, and what was measured."""

    strategy: str
    ranks: int
    runnable: RunnableStrategy
    prediction: Prediction | float | None
    note: str | None
    measurements: list[Measurement] = field(default_factory=list)

    @property
    def precision(self) -> str:
        return self.runnable.plan.numerics.precision

    @property
    def predicted_step_s(self) -> float | None:
        return self.prediction.step_s if isinstance(self.prediction, Prediction) else self.prediction

    @property
    def how(self) -> str:
        plan, parts = self.runnable.plan, self.runnable.parts
        if self.strategy == DATA_PARALLEL:
            return f"one process, {parts} {'GPUs' if self.runnable.device == 'cuda' else 'threads'} · {self.precision}"
        if self.strategy == PLAIN:
            return f"PyTorch without Meshwright · {self.precision}"
        if self.strategy == ALL_CORES:
            return f"one process, {self.runnable.threads} cores · {self.precision}"
        return plan.summary()


def compare(
    job: Job, clusters: Mapping[int, Cluster], settings: Settings, *, only_predict: bool = False
) -> StrategyReport:
    """Compares strategies on `clusters`: the machines by number of devices, one device among them. A strategy that
    cannot train this job is listed with the reason, and so is one whose training fails."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        short_job = _short_job(job, Path(folder))
        parts = JobParts(short_job)
        if not only_predict:
            check_is_local(clusters[max(clusters)])
            check_job(short_job, Plan(), clusters[1], parts)  # a mistake in the job is no reason to skip a strategy
        contestants, skipped = _contestants(parts, clusters, settings, only_predict)
        steps = None
        if not only_predict:
            parts.release()
            steps = _measure(short_job, contestants, skipped, settings, Path(folder), begin)
    rows = _rows(contestants, job.train.global_batch, only_predict)
    name = clusters[max(clusters)].name
    seconds = time.monotonic() - begin
    return StrategyReport(job.name, name, job.train.global_batch, steps, seconds, tuple(rows), tuple(skipped))


# ---- what is compared


def _contestants(
    parts: JobParts, clusters: Mapping[int, Cluster], settings: Settings, only_predict: bool
) -> tuple[list[_Contestant], list[SkippedStrategy]]:
    contestants: list[_Contestant] = []
    skipped: list[SkippedStrategy] = []
    largest = clusters[max(clusters)]
    threads = max(1, largest.cores // largest.device_count) if largest.kind == "cpu" else None
    for ranks, cluster in sorted(clusters.items()):
        planner = StrategyPlanner(parts, cluster, threads)
        for strategy in settings.strategies:
            if not _is_compared(strategy, cluster, is_only_one=largest.device_count == 1):
                continue
            # The automatic plan chooses its precision itself.
            for precision in settings.precisions if strategy != AUTO else settings.precisions[:1]:
                with phase(f"planning {strategy} on {ranks} {'device' if ranks == 1 else 'devices'}, {precision}"):
                    try:
                        contestants.append(_contestant(strategy, precision, planner, parts, only_predict))
                    except InputError as error:
                        skipped.append(SkippedStrategy(strategy, ranks, precision, str(error)))
    return contestants, skipped


def _is_compared(strategy: str, cluster: Cluster, *, is_only_one: bool) -> bool:
    """Whether a strategy is compared on this cluster. Strategies for one device are compared on one device, the others
    on several. If no cluster has several devices (`is_only_one`), the others are listed on the one device, with the
    reason why they cannot be run. `all_cores` is for CPUs."""
    if strategy in ON_ONE_DEVICE:
        return cluster.device_count == 1
    if strategy == ALL_CORES and cluster.kind != "cpu":
        return False
    return cluster.device_count > 1 or is_only_one


def _contestant(
    strategy: str, precision: str, planner: StrategyPlanner, parts: JobParts, only_predict: bool
) -> _Contestant:
    cluster, ranks = planner.cluster, planner.cluster.device_count
    if strategy == DATA_PARALLEL:
        if ranks == 1:
            raise InputError(NEEDS_SEVERAL_DEVICES)
        plan = planner.plan(SINGLE, precision)
        runnable = RunnableStrategy("data parallel", plan, cluster.kind, planner.threads or cluster.cores, ranks)
        note = _note(plan, runnable.loop, parts.model)
        return _Contestant(strategy, ranks, runnable, predict_data_parallel(planner, plan), note)
    plan = planner.plan(strategy, precision)
    if not only_predict:
        check_job(parts.job, plan, cluster, parts)
    threads = plan.compute.threads or max(1, cluster.cores // plan.world_size)
    loop: Loop = "plain" if strategy == PLAIN else "servers" if plan.gradients.servers else "session"
    prediction = planner.predict(plan)
    note = _note(plan, loop, parts.model)
    if only_predict:
        if prediction is None:
            raise InputError("it cannot be predicted")
        note = planner.why_too_large(prediction)
    return _Contestant(strategy, ranks, RunnableStrategy(loop, plan, cluster.kind, threads), prediction, note)


def _short_job(job: Job, folder: Path) -> Job:
    """Returns the job without what is not training: evaluations, checkpoints, callbacks, metrics and TensorBoard, and
    without the learning-rate schedule, whose warm-up would leave the loss as it is in the first steps."""
    return job.model_copy(
        update={
            "data": job.data.model_copy(update={"eval": None, "workers": 0}),
            "checkpoint": job.checkpoint.model_copy(update={"every_steps": None, "best": None}),
            "log": job.log.model_copy(update={"tensorboard": False, "every_steps": 1}),
            "schedule": None,
            "callbacks": [],
            "metrics": {},
            "synthetic": {},
            "plan": "auto",
            "output": str(folder / "runs"),
        }
    )


# ---- measuring


def _measure(
    job: Job,
    contestants: list[_Contestant],
    skipped: list[SkippedStrategy],
    settings: Settings,
    folder: Path,
    begin: float,
) -> int:
    """Measures in rounds, each of which runs every contestant once; every second round goes in the opposite order.
    What the processes do is recorded in the first round. Returns the number of timed steps. A contestant that fails
    (for lack of memory, for example) is moved to `skipped`, and the others continue."""
    reference = next(contestant for contestant in contestants if contestant.strategy == SINGLE)
    with phase("measuring one device to choose the number of steps"):
        probe_begin = time.monotonic()
        probe_steps = _PROBE[reference.runnable.device]
        probe = reference.runnable.measure(job, probe_steps, folder / "probe")
    start_up_s = time.monotonic() - probe_begin - (probe_steps.warm_up + probe_steps.timed) * probe.step_s
    allowed_s = (settings.limit_s - (time.monotonic() - begin)) / len(contestants)
    chosen = choose_steps(settings.steps, probe.step_s, start_up_s, allowed_s, reference.runnable.device)
    for number in range(settings.rounds):
        round_begin = time.monotonic()
        ordered = contestants if number % 2 == 0 else contestants[::-1]
        for position, contestant in enumerate(list(ordered)):
            where = f"round {number + 1} of {settings.rounds}, {position + 1} of {len(ordered)}"
            steps = chosen if number == 0 else replace(chosen, sampled=0, records_timed=False)
            about_s = start_up_s + (steps.warm_up + steps.timed + steps.sampled) * probe.step_s
            with phase(f"{where}: {contestant.strategy}, {contestant.how}", about_s):
                _measure_once(contestant, job, steps, folder / f"{number}-{position}", contestants, skipped)
        now = time.monotonic()
        if now - begin + (now - round_begin) > settings.limit_s:
            break
    return chosen.timed


def choose_steps(timed: int | None, step_s: float, start_up_s: float, allowed_s: float, device: str) -> Steps:
    """Returns the steps of a measurement of the first round. `timed` is None if the user leaves their number to us.
    `step_s` and `start_up_s` are the seconds of a step on one device, and of starting the processes; `allowed_s` are
    those that one measurement may take, so that the first round is complete in time."""
    cpu_warm_up = 1 if step_s > _SLOW_STEP_S else 2
    warm_up = _GPU_WARM_UP if device == "cuda" else cpu_warm_up
    if timed is None:
        affordable = int((allowed_s - start_up_s) / step_s) - warm_up
        if affordable < _FEWEST_WITH_RECORD:
            return Steps(warm_up, timed=1, sampled=0, records_timed=True)
        timed = max(1, min(_MOST_STEPS[device], round(_MEASURED_S / step_s), affordable - 1))
    return Steps(warm_up, timed, sampled=max(1, timed // 2))


def _measure_once(
    contestant: _Contestant,
    job: Job,
    steps: Steps,
    folder: Path,
    contestants: list[_Contestant],
    skipped: list[SkippedStrategy],
) -> None:
    try:
        contestant.measurements.append(contestant.runnable.measure(job, steps, folder))
    except Stopped:
        raise
    except MeshwrightError as error:
        if contestant.strategy == SINGLE:
            raise
        skipped.append(SkippedStrategy(contestant.strategy, contestant.ranks, contestant.precision, str(error)))
        contestants.remove(contestant)


# ---- rows


def _rows(contestants: Sequence[_Contestant], global_batch: int, only_predict: bool) -> list[StrategyRow]:
    baselines = {c.precision: c for c in contestants if c.strategy == SINGLE}
    first = next(iter(baselines.values()))
    return [_row(c, baselines.get(c.precision, first), first, global_batch, only_predict) for c in contestants]


def _row(
    contestant: _Contestant, single: _Contestant, first: _Contestant, global_batch: int, only_predict: bool
) -> StrategyRow:
    prediction, predicted_s = contestant.prediction, contestant.predicted_step_s
    predicted_speedup = None
    if predicted_s is not None and single.predicted_step_s is not None:
        predicted_speedup = figures.speedup(single.predicted_step_s, predicted_s)
    step_s = speedup = exchanged = shares = peak = rate = spread = loss = difference = tolerance = None
    measured = contestant.measurements
    if measured and not only_predict:
        times = [measurement.step_s for measurement in measured]
        step_s, spread = median(times), figures.spread(times) if len(times) > 1 else None
        rate = global_batch / step_s
        speedup = figures.speedup(median(m.step_s for m in single.measurements), step_s)
        exchanged = _first(measured, lambda m: m.exchanged_bytes)
        shares = _first(measured, lambda m: m.shares)
        peak = _first(measured, lambda m: m.peak_memory_bytes)
        loss = _first(measured, lambda m: m.loss)
        other = single if contestant is not single else first
        expected = _first(other.measurements, lambda m: m.loss)
        if loss is not None and expected is not None:
            difference = abs(loss - expected) / max(abs(expected), 1e-12)
            tolerance = max(LOSS_TOLERANCES[contestant.precision], LOSS_TOLERANCES[other.precision])
    return StrategyRow(
        strategy=contestant.strategy,
        how=contestant.how,
        ranks=contestant.ranks,
        precision=contestant.precision,
        samples_per_s=rate,
        speedup=speedup,
        efficiency=None if speedup is None else figures.efficiency(speedup, contestant.ranks),
        exchanged_bytes=exchanged,
        shares=shares,
        peak_memory_bytes=peak,
        predicted_step_s=predicted_s,
        predicted_speedup=predicted_speedup,
        predicted_memory_bytes=prediction.memory_bytes if isinstance(prediction, Prediction) else None,
        measured_step_s=step_s,
        spread=spread,
        rounds=len(measured),
        loss=loss,
        loss_difference=difference,
        loss_tolerance=tolerance,
        loss_agrees=None if difference is None or tolerance is None else difference <= tolerance,
        note=contestant.note,
    )


def _first(measurements: Sequence[Measurement], pick: Callable[[Measurement], Value | None]) -> Value | None:
    return next((value for m in measurements if (value := pick(m)) is not None), None)


def _note(plan: Plan, loop: Loop, model: nn.Module) -> str | None:
    """Says why the loss of a strategy may differ from that of one device by design; None if it may not."""
    if plan.gradients.updates != "synchronous":
        return "asynchronous updates change the loss by design"
    is_alone = plan.batch_parts == 1 and loop == "session"
    if not is_alone and any(isinstance(module, AnyBatchNorm) for module in model.modules()):
        return "BatchNorm normalizes over fewer samples where the batch is divided"
    if not is_alone and any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        return "dropout draws other numbers where the batch is divided, and in a plain loop"
    return None
