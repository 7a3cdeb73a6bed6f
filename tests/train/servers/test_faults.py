"""Killed workers and servers, and stops, of runs with parameter servers. Each run here is a real `meshwright train`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.load import find_newest_valid, load
from meshwright.processes.heartbeat import heartbeat_file, read_heartbeat
from meshwright.train.output.folder import RunFolder
from tests.forking.forked import Process
from tests.processes.processes import is_alive, tree, wait_until
from tests.train import commands
from tests.train.runs.test_faults import JOB
from tests.train.toy import Net
from validation.bench.faults.inject import kill
from validation.bench.faults.moments import wait_for

pytestmark = pytest.mark.usefixtures("nothing_left")

STEPS = 51
MODES = ["synchronous", "asynchronous", "bounded"]


def start(folder: Path, gradients: dict[str, Any], workers: int = 2, **changes: Any) -> tuple[Process, RunFolder]:
    plan = {"axes": {"replicate": workers}, "gradients": gradients}
    return commands.start(folder, {**JOB, "plan": plan, **changes}, workers)


def gated(gate: Path, free: int) -> dict[str, Any]:
    return {**JOB["data"], "train": {"call": "tests.train.gated:Gated", "gate": str(gate), "free": free}}


def last_checkpoint(folder: RunFolder) -> dict[str, torch.Tensor]:
    """Weights, buffers and optimizer state of the last checkpoint, as one process loads them."""
    newest = find_newest_valid(folder.checkpoints)
    assert newest.path is not None
    assert newest.manifest is not None
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    load(newest.path, newest.manifest, model, optimizer)
    moments = optimizer.state_dict()["state"]
    return {**model.state_dict(), **{f"{n}.{k}": v for n, entry in moments.items() for k, v in entry.items()}}


def curve(folder: RunFolder) -> dict[int, float]:
    entries = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    return {entry["step"]: entry["loss"] for entry in entries if entry["kind"] == "train"}


@pytest.mark.soak  # with threads instead of processes, test_dead_workers.py checks the same
@pytest.mark.parametrize("updates", MODES)
def test_the_run_continues_without_a_killed_worker_until_it_is_back(tmp_path: Path, updates: str) -> None:
    """The others pass the batch at which it died; when it is back, the gate opens, and all finish."""
    gate = tmp_path / "gate"
    gradients = {"servers": 1 + (updates == "bounded"), "updates": updates, "staleness": 1}
    process, folder = start(tmp_path, gradients, data=gated(gate, 16 * 20))
    killed = kill(rank=1).at(step=5).during("backward").inject(folder).seen
    wait_for(folder, rank=0, step=min(15, killed.step + 5))
    last_seen_at = heartbeat_file(folder.logs, 1)

    def is_back() -> bool:
        now = read_heartbeat(last_seen_at)
        return now is not None and now.pid != killed.pid and now.completed > 0

    wait_until(is_back, "the killed worker to come back")
    everybody = tree(process.pid) - {process.pid}
    gate.touch()
    result, err = commands.finish(process, STEPS)
    assert result["restarts"] == 1
    assert f"rank 1 was killed by SIGKILL at step {killed.step} (backward): it starts again alone" in err
    assert "worker 1 is gone" in err
    assert "worker 1 is back" in err
    assert result["metrics"]["accuracy"] > 0.5
    assert (folder.logs / "rank-1.log").read_text().count("--- attempt 0") == 2
    wait_until(lambda: not any(map(is_alive, everybody)), "all processes to end")
    if updates == "bounded":
        assert result["staleness"]["largest_lead"] <= 1


@pytest.mark.soak
def test_without_restarts_the_others_finish_alone(tmp_path: Path) -> None:
    changes: Any = {"train": {**JOB["train"], "restarts": 0}}
    process, folder = start(tmp_path, {"servers": 1}, **changes)
    kill(rank=1).at(step=5).inject(folder)
    result, err = commands.finish(process, STEPS)
    assert "the others go on without it" in err
    assert "the mean is over the samples of the others" in err
    assert result["restarts"] == 0


@pytest.mark.soak
def test_a_killed_server_costs_a_restart_of_all_and_changes_no_bit(tmp_path: Path) -> None:
    undisturbed, calm = start(tmp_path / "calm", {"servers": 2})
    commands.finish(undisturbed, STEPS)
    process, folder = start(tmp_path / "broken", {"servers": 2})
    kill(rank=3).at(step=12).inject(folder)
    result, err = commands.finish(process, STEPS)
    assert "rank 3 was killed by SIGKILL" in err
    assert "all ranks start again" in err
    assert result["restarts"] == 1
    assert result["recovery_s"] == pytest.approx(sum(result["recovery_parts_s"].values()), abs=0.01)
    expected, found = last_checkpoint(calm), last_checkpoint(folder)
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


@pytest.mark.soak
def test_after_a_stop_the_run_resumes_with_other_servers_or_none(tmp_path: Path) -> None:
    """First without a stop under plain replicas, then stopped under servers, taken up by more of them, and by none."""
    process, calm = start(tmp_path / "calm", {})
    commands.finish(process, STEPS)
    for gradients, step in (({"servers": 1}, 7), ({"servers": 3}, 21)):
        process, folder = start(tmp_path / "stopped", gradients)
        wait_for(folder, rank=2, step=step)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1, err
        assert "the same command resumes it" in err.splitlines()[-1]
        assert "Traceback" not in err
    process, folder = start(tmp_path / "stopped", {})
    _, err = commands.finish(process, STEPS)
    assert "resuming after step" in err
    assert os.listdir(tmp_path / "stopped" / "runs") == ["toy-0001"]
    expected, found = last_checkpoint(calm), last_checkpoint(folder)
    assert expected.keys() == found.keys()
    assert all(
        torch.equal(found[name], value) for name, value in expected.items() if name.endswith((".step", "tracked"))
    )
    assert curve(folder) == pytest.approx(curve(calm), rel=0.02)  # Adam in fp32 makes much of the last bits


@pytest.mark.soak
def test_a_worker_that_hangs_is_named(tmp_path: Path) -> None:
    changes: Any = {"train": {**JOB["train"], "restarts": 0, "timeout_s": 3}, "data": gated(tmp_path / "never", 100)}
    process, _ = start(tmp_path, {"servers": 1, "updates": "asynchronous"}, **changes)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "no answer within 3 s from worker" in err
    assert "last seen at step" in err


# ---- the default job


@pytest.mark.soak
@pytest.mark.parametrize(("updates", "servers"), [("synchronous", 2), ("asynchronous", 1), ("bounded", 2)])
def test_digits_are_learnt_in_every_mode(tmp_path: Path, updates: str, servers: int) -> None:
    settings = [
        "plan.axes.replicate=2",
        f"plan.gradients.servers={servers}",
        f"plan.gradients.updates={updates}",
        f"output={tmp_path}",
    ]
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "meshwright", "train", "jobs/mnist.yaml", "--cluster", "2xcpu", "--json", *words]
    out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=280).stdout
    result = json.loads(out.splitlines()[-1])
    assert result["metrics"]["accuracy"] >= 0.96
    staleness = result["staleness"]
    assert staleness["mean"] > 0 if updates != "synchronous" else staleness == {"mean": 0.0, "max": 0}
    assert staleness.get("largest_lead", 0) <= 2
