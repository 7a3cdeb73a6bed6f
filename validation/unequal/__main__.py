"""`python -m validation.unequal`: trains the MNIST job on two CPU ranks, of which a cgroup holds rank 1 to half a core,
with even shares, with shares in proportion to the speeds, and with adaptive ones. Prints the samples/s of each, and how
adaptive shares changed. Runs alternate, because the speed of a machine changes from minute to minute."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from validation.unequal.cpu_quota import cpu_quota

BATCH, STEPS, MEASURED_FROM = 128, 90, 50
SHARES: dict[str, Any] = {"even": "[64, 64]", "proportional": "[86, 42]", "adaptive": "adaptive"}


def main(rounds: int) -> None:
    rates: dict[str, list[float]] = {name: [] for name in SHARES}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for name, shares in SHARES.items():
                run = train(Path(folder) / f"{name}-{number}", shares)
                rates[name].append(samples_per_s(run))
                print(f"round {number}: {name:13} {rates[name][-1]:8.1f} samples/s {describe_changes(run)}", flush=True)
    for name in ("proportional", "adaptive"):
        ratios = [rate / even for rate, even in zip(rates[name], rates["even"], strict=True)]
        print(f"{name} / even: median {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}, {rounds} rounds)")


def train(folder: Path, shares: str) -> Path:
    """Trains with rank 1 at half a core. Returns the run folder."""
    settings = {
        "data.synthetic": "true",
        "data.eval": "null",
        "train.steps": STEPS,
        "train.global_batch": BATCH,
        "log.every_steps": 5,
        "log.tensorboard": "false",
        "checkpoint.every_steps": "null",
        "checkpoint.best": "null",
        "plan.axes.replicate": 2,
        "plan.compute.threads": 1,
        "plan.shares": shares,
        "cluster": "2xcpu",
        "output": folder,
    }
    words = [sys.executable, "-m", "meshwright", "train", "mnist", "--json"]
    words += [f"--set={name}={value}" for name, value in settings.items()]
    with cpu_quota(f"meshwright-{folder.name}", 0.5) as members:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            members.write_text(f"{pid_of_rank(folder / 'mnist-0001', 1, process)}")
            _, errors = process.communicate()
        finally:
            process.terminate()
            process.wait()
    if process.returncode:
        raise SystemExit(errors)
    return folder / "mnist-0001"


def pid_of_rank(run: Path, rank: int, process: "subprocess.Popen[str]") -> int:
    """The process of a rank, which it writes down after its first step."""
    file = run / "times" / f"rank-{rank}.jsonl"
    while True:
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        starts = [json.loads(line) for line in lines if line.endswith("\n") and '"pid"' in line]
        if starts:
            return int(starts[-1]["pid"])
        if process.poll() is not None:
            raise SystemExit(process.communicate()[1])
        time.sleep(0.01)


def samples_per_s(run: Path) -> float:
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    begin, *_, end = [entry for entry in entries if entry["kind"] == "train" and entry["step"] >= MEASURED_FROM]
    return float((end["step"] - begin["step"]) * BATCH / (end["time"] - begin["time"]))


def describe_changes(run: Path) -> str:
    file = run / "shares.jsonl"
    decisions = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    changes = [f"{d['samples'][0]}, {d['samples'][1]} from step {d['first'] + 1}" for d in decisions if "first" in d]
    return "; ".join(changes)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
