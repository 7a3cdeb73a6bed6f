"""How fast a job trains one way and another: always beside a bare PyTorch loop, in alternating rounds."""

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
from meshwright.cluster.detect import check_here
from meshwright.errors import InputError, MeshwrightError, Stopped, did_you_mean
from meshwright.job import Job
from meshwright.launch import environment
from meshwright.plan import Plan
from meshwright.train.check import check
from meshwright.train.run import train

REFERENCE = "bare PyTorch loop"
STRATEGIES = ("one rank", "threads", "replicate", "shard", "tensor", "pipeline", "auto")


@dataclass(frozen=True)
class Row:
    """`ratio` is to the reference's median; `spread` is (highest - lowest) / median over the rounds."""

    strategy: str
    how: str
    ranks: int
    samples_per_s: float
    ratio: float
    spread: float
    rounds: int


@dataclass(frozen=True)
class Skipped:
    """A strategy that this job cannot be trained with, or that failed."""

    strategy: str
    reason: str


@dataclass(frozen=True)
class _Way:
    how: str
    ranks: int
    measure: Callable[[], float]


def chosen(only: str | None) -> tuple[str, ...]:
    """The strategies of `--only A,B`, in the order of the table; all without it."""
    if only is None:
        return STRATEGIES
    names = [name.strip() for name in only.split(",")]
    for name in names:
        if name not in STRATEGIES:
            raise InputError(f"--only {only}: there is no strategy '{name}'{did_you_mean(name, STRATEGIES)}")
    return tuple(name for name in STRATEGIES if name in names)


def compare(
    job: Job, cluster: Cluster, strategies: Sequence[str], plan_for: Callable[[str], Plan], steps: int, rounds: int
) -> tuple[list[Row], list[Skipped]]:
    """One round runs every strategy once, so that a machine that slows down slows all of them. `plan_for` raises an
    `InputError` for a strategy that the model cannot be divided by."""
    check_here(cluster)
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        quick = _without_interruptions(job, steps, Path(folder))
        check(quick, Plan(), cluster)  # what is wrong with the job itself is no strategy's fault
        ways, skipped = _ways(quick, cluster, strategies, plan_for, steps, Path(folder) / "job.yaml")
        rates = _measured(ways, rounds, skipped)
    reference = median(rates[REFERENCE])
    rows = [
        Row(
            strategy=name,
            how=ways[name].how,
            ranks=ways[name].ranks,
            samples_per_s=median(found),
            ratio=median(found) / reference,
            spread=(max(found) - min(found)) / median(found),
            rounds=rounds,
        )
        for name, found in rates.items()
    ]
    return rows, [Skipped(name, reason) for name, reason in skipped.items()]


def lines(rows: Sequence[Row], skipped: Sequence[Skipped]) -> list[str]:
    width = max(len(row.how) for row in rows)
    table = [
        f"{row.strategy:18} {row.how:{width}} {row.samples_per_s:10,.0f} samples/s  ratio {row.ratio:.3f}"
        f"  spread {row.spread:.1%} over {row.rounds} rounds"
        for row in rows
    ]
    return table + [f"{one.strategy:18} not run: {one.reason}" for one in skipped]


def _ways(
    job: Job, cluster: Cluster, strategies: Sequence[str], plan_for: Callable[[str], Plan], steps: int, file: Path
) -> tuple[dict[str, _Way], dict[str, str]]:
    """The reference and what can be run of the strategies, and why the others cannot. Loops read `file`."""
    file.write_text(job.to_yaml())
    loop = partial(_own_process, "meshwright.bench.bare", file, steps, cluster, cluster.cores)
    ways, skipped = {REFERENCE: _Way("one process", 1, loop)}, {}
    for name in strategies:
        try:
            if name == "threads":
                ways[name] = _threads(file, steps, cluster)
            else:
                plan = plan_for(name)
                check(job, plan, cluster)
                ways[name] = _Way(plan.summary(), plan.world_size, partial(_trained, job, plan, cluster))
        except InputError as error:
            skipped[name] = str(error)
    return ways, skipped


def _measured(ways: dict[str, _Way], rounds: int, skipped: dict[str, str]) -> dict[str, list[float]]:
    """Samples per second of every round. A strategy that fails, for want of memory say, costs the others nothing."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name in list(rates):
            try:
                rates[name].append(ways[name].measure())
            except Stopped:
                raise
            except MeshwrightError as error:
                if name == REFERENCE:
                    raise
                skipped[name] = str(error)
                del rates[name]
    return rates


def _without_interruptions(job: Job, steps: int, folder: Path) -> Job:
    """The same training, without what the bare loop does not do either: evaluations and checkpoints."""
    return job.model_copy(
        update={
            "train": job.train.model_copy(update={"steps": steps + 1, "epochs": None}),
            "data": job.data.model_copy(update={"eval": None, "workers": 0}),
            "checkpoint": job.checkpoint.model_copy(update={"every_steps": None, "best": None}),
            "plan": "auto",
            "output": str(folder / "runs"),
        }
    )


def _trained(job: Job, plan: Plan, cluster: Cluster) -> float:
    result: dict[str, Any] = train(job, plan, cluster, resume="never")
    return float(result["samples_per_s"])


def _threads(job_file: Path, steps: int, cluster: Cluster) -> _Way:
    threads = cluster.devices
    if threads == 1:
        raise InputError("threads needs several devices, and the cluster has one")
    cores = max(1, cluster.cores // threads)
    measure = partial(_own_process, "meshwright.bench.threads", job_file, steps, cluster, cores, str(threads))
    return _Way(f"one process, {threads} threads", 1, measure)


def _own_process(module: str, job_file: Path, steps: int, cluster: Cluster, cores: int, *more: str) -> float:
    """What the loop in `module` prints. Each of its threads computes on so many cores."""
    with environment.changed({"OMP_NUM_THREADS": str(cores), "MKL_NUM_THREADS": str(cores)}):
        command = [sys.executable, "-m", module, str(job_file), str(steps), cluster.kind, *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MeshwrightError(f"{module} failed: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
    return float(done.stdout.split()[-1])
