"""A rank that computes slowly in a real run: the run's output, its result and its page name it, and what it spends its
time on."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.report.run.page import run_page
from meshwright.train.output.folder import RunFolder
from tests.forking.forked import Process, start, start_command
from validation.bench.faults.inject import slow

STEPS = 40
SETTINGS = {
    "data.synthetic": "true",
    "train.steps": STEPS,
    "train.global_batch": 32,
    "log.eval_every_steps": 1_000_000,  # only at the end
    "plan.axes.replicate": 2,
    "cluster": "2xcpu",
}
LINE = r"rank 1 is \d+\.\d times slower than the median of the other ranks: \d+% of its step is the \w+ pass"


def begin(folder: Path, launcher: str) -> Process:
    settings = {**SETTINGS, "output": folder / "runs"}
    words = ["train", "mnist", "--json", *(f"--set={name}={value}" for name, value in settings.items())]
    if launcher == "meshwright":
        return start_command(words)
    ranks = ["--standalone", "--nproc-per-node", "2", "--log-dir", str(folder / "elastic")]
    return start("tests.forking.forked:torchrun", *ranks, "-m", "meshwright", *words)


@pytest.mark.soak
@pytest.mark.parametrize("launcher", ["meshwright", "torchrun"])
def test_a_slow_rank_and_what_it_spends_its_time_on_are_named(tmp_path: Path, launcher: str) -> None:
    process = begin(tmp_path, launcher)
    run = RunFolder(tmp_path / "runs" / "mnist-0001")
    with slow(rank=1, factor=3).at(step=2).inject(run):
        out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    (warning,) = re.findall(f"^warning: ({LINE})$", err, re.MULTILINE)
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert (result["steps"], result["straggler"]) == (STEPS, warning)
    section = next(section for section in run_page(run.path).sections if section.title == "Stragglers")
    assert section.explanation.startswith("Rank 1 computes at least 10% longer than the median rank")
    assert re.search(f"With loading, {LINE}\\.", section.explanation)
