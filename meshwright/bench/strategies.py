"""How fast a job trains one way and another: always beside a bare PyTorch loop, in alternating rounds."""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.cluster.cluster import Cluster
from meshwright.errors import MeshwrightError
from meshwright.job import Job
from meshwright.launch import environment
from meshwright.plan import Axes, Plan
from meshwright.train.run import train

REFERENCE = "bare PyTorch loop"


@dataclass(frozen=True)
class Row:
    """`ratio` is to the reference's median; `spread` is (highest - lowest) / median over the rounds."""

    strategy: str
    ranks: int
    samples_per_s: float
    ratio: float
    spread: float
    rounds: int


def compare(job: Job, cluster: Cluster, steps: int, rounds: int) -> list[Row]:
    """One round runs every strategy once, so that a machine that slows down slows all of them."""
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        quick = _without_interruptions(job, steps, Path(folder))
        file = Path(folder) / "job.yaml"
        file.write_text(quick.to_yaml())
        strategies: dict[str, tuple[int, Callable[[], float]]] = {
            REFERENCE: (1, lambda: _bare(file, steps, cluster.cores)),
            "one rank": (1, lambda: _trained(quick, 1, cluster)),
        }
        if cluster.devices > 1:
            strategies["replicate"] = (cluster.devices, lambda: _trained(quick, cluster.devices, cluster))
        rates: dict[str, list[float]] = {name: [] for name in strategies}
        for _ in range(rounds):
            for name, (_, measure) in strategies.items():
                rates[name].append(measure())
    reference = median(rates[REFERENCE])
    return [
        Row(
            strategy=name,
            ranks=strategies[name][0],
            samples_per_s=median(found),
            ratio=median(found) / reference,
            spread=(max(found) - min(found)) / median(found),
            rounds=rounds,
        )
        for name, found in rates.items()
    ]


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


def _trained(job: Job, ranks: int, cluster: Cluster) -> float:
    result: dict[str, Any] = train(job, Plan(axes=Axes(replicate=ranks)), cluster, resume="never")
    return float(result["samples_per_s"])


def _bare(job_file: Path, steps: int, threads: int) -> float:
    with environment.changed({"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}):
        command = [sys.executable, "-m", "meshwright.bench.bare", str(job_file), str(steps)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MeshwrightError(f"the bare loop failed: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
    return float(done.stdout.split()[-1])
