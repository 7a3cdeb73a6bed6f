"""Trains plans of two CPU ranks with the programs that they were exported for (`meshwright export PLAN --to PROGRAM`),
and by this package: the layout, the batch, the precision and the losses are the same, and the time of a step is
compared with the predicted one.

    python -m validation.exports.compare [--python .venv-peers/bin/python] [--steps 24] [--only "deepspeed: replicas"]

needs DeepSpeed and Accelerate, which `make peers` installs in an environment of their own. Prints one JSON object for
each case. The ratio is that of a program's median step to the step that `meshwright plan --plan` predicts; only
ratios of one run can be compared."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from meshwright.cli.ready_jobs import find_job
from meshwright.cluster.detect import find_cluster
from meshwright.export.configurations.write import export_plan
from meshwright.job import load_job
from meshwright.plan import Plan
from validation.bench.peers.catalog import DEFAULT_PYTHON
from validation.bench.peers.ranks import RankCommand, run_ranks

LIMIT_S = 240.0
RANKS = 2
JOB = {"schedule": None, "data.synthetic": True, "train.clip_norm": 1.0}  # in addition to the job mnist
ADAMW = {"call": "torch.optim:AdamW", "lr": 1e-3}


@dataclass(frozen=True)
class Case:
    """A plan that is exported to a program, and what the program has to say about its layout."""

    name: str
    program: str
    plan: dict[str, Any]
    layout: dict[str, Any]
    tolerance: float = 1e-4
    optimizer: dict[str, Any] | None = None  # in place of the job's
    batch: int | None = None  # in place of the job's; small in bf16, which many processors emulate

    @property
    def title(self) -> str:
        return f"{self.program}: {self.name}"


CASES = (
    Case(
        "replicas",
        "deepspeed",
        {"axes": {"replicate": 2}},
        {"stage": 0, "samples": 64, "accumulation": 1, "precision": "fp32", "optimizer": "SGD"},
    ),
    Case(
        "shards of parameters",
        "deepspeed",
        {"axes": {"shard": 2}, "memory": {"accumulation": 2}},
        {"stage": 3, "samples": 32, "accumulation": 2, "precision": "fp32", "optimizer": "AdamW"},
        optimizer=ADAMW,
    ),
    Case(
        "shards of gradients in bf16",
        "deepspeed",
        {"axes": {"shard": 2}, "memory": {"sharding": "gradients"}, "numerics": {"precision": "bf16"}},
        {"stage": 2, "samples": 4, "accumulation": 1, "precision": "torch.bfloat16", "optimizer": "SGD"},
        tolerance=2e-2,
        batch=8,
    ),
    Case(
        "replicas",
        "accelerate",
        {"axes": {"replicate": 2}},
        {"kind": "MULTI_CPU", "wrapper": "DistributedDataParallel", "samples": 64, "precision": "no"},
    ),
    Case(
        "replicas in bf16, accumulation",
        "accelerate",
        {"axes": {"replicate": 2}, "memory": {"accumulation": 2}, "numerics": {"precision": "bf16"}},
        {"kind": "MULTI_CPU", "samples": 2, "accumulation": 2, "precision": "bf16"},
        tolerance=2e-2,
        batch=8,
    ),
)


def run_case(case: Case, python: Path, steps: int, folder: Path, predicts: bool = True) -> dict[str, Any]:
    """Trains by one exported plan, with the program and with this package. Returns the losses, the layout, and the
    times of a step; `equal` says whether all of it is as planned."""
    job_file, plan_file = folder / "job.yaml", folder / "plan.yaml"
    job_file.write_text(_job_text(case))
    plan = Plan.model_validate({**case.plan, "compute": {"threads": 1}}).save(plan_file)
    job = load_job(job_file)
    exported = export_plan(plan_file, case.program, job, find_cluster("2xcpu"), folder / "exported")
    words = (str(exported.file), str(job_file), str(steps))
    accumulation = plan.memory.accumulation
    # The variables of the exported command, except those that the ranks get from `run_ranks`.
    variables = dict(word.split("=") for word in exported.command.split() if "=" in word)
    theirs = _run(python, case.program, words, variables)
    ours = _run(python, "meshwright", (str(plan_file), *words[1:]), {})
    errors = [abs(a - b) / abs(b) for a, b in zip(theirs["losses"], ours["losses"], strict=True)]
    expected = {**case.layout, "ranks": RANKS, "global_batch": job.train.global_batch}
    layout = {name: theirs["layout"].get(name) for name in expected}
    result = {
        "case": case.title,
        "plan": plan.summary(),
        "layout": layout,
        "cannot_say": [entry.field for entry in exported.cannot_say],
        "first_and_last_loss": [theirs["losses"][0], theirs["losses"][-1]],
        "largest_relative_error": max(errors),
        "tolerance": case.tolerance,
        "equal": layout == expected and max(errors) <= case.tolerance,
        "accumulation": accumulation,
        "step_s": theirs["step_s"],
        "our_step_s": ours["step_s"],
    }
    if predicts:
        planned = _predicted_s(job_file, plan_file)
        result |= {"planned_step_s": planned, "ratio_to_planned": theirs["step_s"] / planned}
        result["our_ratio_to_planned"] = ours["step_s"] / planned
    return result


def _job_text(case: Case) -> str:
    job: dict[str, Any] = yaml.safe_load(find_job("mnist").read_text())
    job["schedule"], job["train"]["clip_norm"] = None, JOB["train.clip_norm"]
    job["data"]["synthetic"] = JOB["data.synthetic"]
    job["optimizer"] = case.optimizer or job["optimizer"]
    job["train"]["global_batch"] = case.batch or job["train"]["global_batch"]
    return yaml.safe_dump(job)


def _run(python: Path, program: str, words: tuple[str, ...], variables: dict[str, str]) -> dict[str, Any]:
    from meshwright.processes import environment

    kept = {name: value for name, value in variables.items() if name != "OMP_NUM_THREADS"}
    with environment.environment_variables(kept):
        return run_ranks(RankCommand(python, "validation.exports.rank", (program, *words), RANKS, 1, LIMIT_S))


def _predicted_s(job_file: Path, plan_file: Path) -> float:
    """The seconds of a step that the planner predicts for two cores of this machine, which it measures first."""
    words = ["plan", str(job_file), "--plan", str(plan_file), "--cluster", "2xcpu", "--json"]
    run = subprocess.run([sys.executable, "-m", "meshwright", *words], capture_output=True, text=True, check=True)
    return float(json.loads(run.stdout.splitlines()[-1])["best"]["step_s"])


def results(python: Path, steps: int, only: str) -> Iterator[dict[str, Any]]:
    """Runs all cases, or the one with the title `only`."""
    for case in CASES:
        if only not in ("", case.title):
            continue
        with tempfile.TemporaryDirectory(prefix="meshwright-exports-") as folder:
            yield run_case(case, python, steps, Path(folder))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=DEFAULT_PYTHON)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--only", default="", choices=[case.title for case in CASES])
    arguments = parser.parse_args()
    all_equal = True
    for result in results(arguments.python, arguments.steps, arguments.only):
        print(json.dumps(result), flush=True)
        all_equal = all_equal and result["equal"]
    return 0 if all_equal else 1


if __name__ == "__main__":
    sys.exit(main())
