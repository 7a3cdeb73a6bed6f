"""`meshwright bench strategies`: how fast a job trains with each strategy, compared with a bare PyTorch loop. The
strategies take turns, one run each per round."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import check_is_local
from meshwright.errors import InputError, MeshwrightError, Stopped, did_you_mean
from meshwright.files.storage import write_atomically
from meshwright.job import Job
from meshwright.launch import environment
from meshwright.plan import Plan
from meshwright.train.check import check_job
from meshwright.train.job_parts import JobParts
from meshwright.train.run import train

REFERENCE = "bare PyTorch loop"
STRATEGIES = ("one rank", "threads", "replicate", "shard", "tensor", "pipeline", "auto")


@dataclass(frozen=True)
class StrategyRow:
    """The measured speed of one strategy.

    how            the plan's summary, or the number of processes and threads
    samples_per_s  the median over the rounds
    ratio          `samples_per_s` divided by that of the reference
    spread         (highest - lowest) / median of the samples per second over the rounds
    """

    strategy: str
    how: str
    ranks: int
    samples_per_s: float
    ratio: float
    spread: float
    rounds: int


@dataclass(frozen=True)
class SkippedStrategy:
    """A strategy with which this job cannot be trained, or whose training failed, and the reason."""

    strategy: str
    reason: str


@dataclass(frozen=True)
class _Measurement:
    """A strategy that can be run. `measure` trains once and returns the samples per second."""

    how: str
    ranks: int
    measure: Callable[[], float]


PlanForStrategy = Callable[[str, JobParts], Plan]


def selected_strategies(only: str | None) -> tuple[str, ...]:
    """Returns the strategies that `--only A,B` names, in the order of `STRATEGIES`; all strategies if `only` is
    None."""
    if only is None:
        return STRATEGIES
    names = [name.strip() for name in only.split(",")]
    for name in names:
        if name not in STRATEGIES:
            raise InputError(f"--only {only}: there is no strategy '{name}'{did_you_mean(name, STRATEGIES)}")
    return tuple(name for name in STRATEGIES if name in names)


def compare(
    job: Job, cluster: Cluster, strategies: Sequence[str], plan_for: PlanForStrategy, steps: int, rounds: int
) -> tuple[list[StrategyRow], list[SkippedStrategy]]:
    """Measures the reference and the strategies. Returns one row for each that ran, and the strategies that did not
    run. One round runs each of them once, so that a machine that slows down slows all of them. `plan_for` returns the
    plan of a strategy, or raises an `InputError` if there is none."""
    check_is_local(cluster)
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        short_job = _without_interruptions(job, steps, Path(folder))
        parts = JobParts(short_job)
        check_job(short_job, Plan(), cluster, parts)  # a mistake in the job is no reason to skip a strategy
        measurements, skipped = _measurements(parts, cluster, strategies, plan_for, steps, Path(folder) / "job.yaml")
        parts.release()
        rates = _measure_rounds(measurements, rounds, skipped)
    reference = median(rates[REFERENCE])
    rows = [
        StrategyRow(
            strategy=name,
            how=measurements[name].how,
            ranks=measurements[name].ranks,
            samples_per_s=median(round_rates),
            ratio=median(round_rates) / reference,
            spread=(max(round_rates) - min(round_rates)) / median(round_rates),
            rounds=rounds,
        )
        for name, round_rates in rates.items()
    ]
    return rows, [SkippedStrategy(name, reason) for name, reason in skipped.items()]


def report_lines(rows: Sequence[StrategyRow], skipped: Sequence[SkippedStrategy]) -> list[str]:
    width = max(len(row.how) for row in rows)
    table = [
        f"{row.strategy:18} {row.how:{width}} {row.samples_per_s:10,.0f} samples/s  ratio {row.ratio:.3f}"
        f"  spread {row.spread:.1%} over {row.rounds} rounds"
        for row in rows
    ]
    return table + [f"{strategy.strategy:18} not run: {strategy.reason}" for strategy in skipped]


def _measurements(
    parts: JobParts, cluster: Cluster, strategies: Sequence[str], plan_for: PlanForStrategy, steps: int, file: Path
) -> tuple[dict[str, _Measurement], dict[str, str]]:
    """Returns the measurements of the reference and of the strategies that can be run, and for the other strategies the
    reason why not, both by strategy. Writes the job to `file`, from which the bare loops read it."""
    job = parts.job
    write_atomically(file, job.to_yaml())
    loop = partial(_run_loop, "meshwright.bench.bare", file, steps, cluster, cluster.cores)
    measurements, skipped = {REFERENCE: _Measurement("one process", 1, loop)}, {}
    for name in strategies:
        try:
            if name == "threads":
                measurements[name] = _threads(file, steps, cluster)
            else:
                plan = plan_for(name, parts)
                check_job(job, plan, cluster, parts)
                run = partial(_train, job, plan, cluster)
                measurements[name] = _Measurement(plan.summary(), plan.world_size, run)
        except InputError as error:
            skipped[name] = str(error)
    return measurements, skipped


def _measure_rounds(
    measurements: dict[str, _Measurement], rounds: int, skipped: dict[str, str]
) -> dict[str, list[float]]:
    """Returns the samples per second of every round, by strategy. A strategy that fails (for lack of memory, for
    example) is added to `skipped`, and the others continue."""
    rates: dict[str, list[float]] = {name: [] for name in measurements}
    for _ in range(rounds):
        for name in list(rates):
            try:
                rates[name].append(measurements[name].measure())
            except Stopped:
                raise
            except MeshwrightError as error:
                if name == REFERENCE:
                    raise
                skipped[name] = str(error)
                del rates[name]
    return rates


def _without_interruptions(job: Job, steps: int, folder: Path) -> Job:
    """Returns the job with `steps` + 1 steps, and without evaluations and checkpoints, because the bare loop does none
    either."""
    return job.model_copy(
        update={
            "train": job.train.model_copy(update={"steps": steps + 1, "epochs": None}),
            "data": job.data.model_copy(update={"eval": None, "workers": 0}),
            "checkpoint": job.checkpoint.model_copy(update={"every_steps": None, "best": None}),
            "plan": "auto",
            "output": str(folder / "runs"),
        }
    )


def _train(job: Job, plan: Plan, cluster: Cluster) -> float:
    result: dict[str, Any] = train(job, plan, cluster, resume="never")
    return float(result["samples_per_s"])


def _threads(job_file: Path, steps: int, cluster: Cluster) -> _Measurement:
    threads = cluster.device_count
    if threads == 1:
        raise InputError("threads needs several devices, but the cluster has one")
    cores = max(1, cluster.cores // threads)
    measure = partial(_run_loop, "meshwright.bench.threads", job_file, steps, cluster, cores, str(threads))
    return _Measurement(f"one process, {threads} threads", 1, measure)


def _run_loop(module: str, job_file: Path, steps: int, cluster: Cluster, cores: int, *arguments: str) -> float:
    """Runs the training loop in `module` in a process of its own, and returns the samples per second that it prints.
    Each thread of the process computes on `cores` cores."""
    with environment.environment_variables({"OMP_NUM_THREADS": str(cores), "MKL_NUM_THREADS": str(cores)}):
        command = [sys.executable, "-m", module, str(job_file), str(steps), cluster.kind, *arguments]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise MeshwrightError(f"{module} failed: {(process.stderr.strip().splitlines() or ['no message'])[-1]}")
    return float(process.stdout.split()[-1])
