"""Errors of communication become one line that names ranks; other errors are not changed."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.processes.communication_errors import explain_communication_error
from meshwright.processes.heartbeat import Heartbeat
from meshwright.processes.world import World

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"
RANK_1 = World(1, 1, 3, 3, 0, torch.device("cpu"), None)


def heartbeat_at(folder: Path, rank: int, step: int, activity: str) -> Heartbeat:
    heartbeat = Heartbeat.in_folder(folder, rank, attempt=0)
    heartbeat.update(step, activity)
    return heartbeat


def test_the_rank_that_is_behind_is_named(tmp_path: Path) -> None:
    heartbeat = heartbeat_at(tmp_path, 1, 57, "backward")
    heartbeat_at(tmp_path, 0, 57, "backward")
    heartbeat_at(tmp_path, 2, 56, "evaluate")
    error = RuntimeError(f"{GLOO}unbound_buffer.cc:119] Timed out waiting 30000ms for recv operation to complete")
    explained = explain_communication_error(error, RANK_1, heartbeat, 30, tmp_path)
    assert str(explained) == (
        "rank 1, step 57, gradient all-reduce (backward): no answer within 30 s;"
        " rank 2 was last seen at step 56 in evaluate"
    )


def test_the_rank_that_is_gone_is_named(tmp_path: Path) -> None:
    heartbeat = heartbeat_at(tmp_path, 1, 57, "forward")
    heartbeat_at(tmp_path, 0, 56, "forward")
    script = (
        "from pathlib import Path; from meshwright.processes.heartbeat import Heartbeat;"
        f"Heartbeat.in_folder(Path({str(tmp_path)!r}), 2, 0).update(57, 'backward')"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=os.getcwd())
    explained = explain_communication_error(
        RuntimeError(f"{GLOO}pair.cc:547] Connection closed by peer"), RANK_1, heartbeat, 30, tmp_path
    )
    assert str(explained) == (
        "rank 1, step 57, communication (forward): the connection broke;"
        " rank 2 is gone, last seen at step 57 in backward"
    )


def test_a_rank_that_runs_is_not_gone_on_systems_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat = heartbeat_at(tmp_path, 1, 57, "forward")
    heartbeat_at(tmp_path, 0, 56, "forward")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(Path, "read_text", lambda path, *_: (path / "none").read_bytes())  # no file is there
    explained = explain_communication_error(
        RuntimeError(f"{GLOO}pair.cc:547] Connection closed by peer"), RANK_1, heartbeat, 30, tmp_path
    )
    assert "gone" not in str(explained)


def test_without_a_folder_only_this_ranks_heartbeat_is_known() -> None:
    explained = explain_communication_error(
        dist.DistStoreError("wait timeout after 2000ms, keys: /zz"), RANK_1, Heartbeat.in_memory(), 2, None
    )
    assert str(explained) == "rank 1, communication (start-up): no answer within 2 s"


def test_ranks_of_other_machines_are_not_looked_for_on_this_one(tmp_path: Path) -> None:
    heartbeat = heartbeat_at(tmp_path, 1, 57, "backward")
    several_machines = dataclasses.replace(RANK_1, size=6)
    explained = explain_communication_error(
        RuntimeError("Timed out waiting 30000ms: gloo"), several_machines, heartbeat, 30, tmp_path
    )
    assert str(explained) == "rank 1, step 57, gradient all-reduce (backward): no answer within 30 s"


def test_a_connection_that_closes_after_a_timeout_is_a_timeout_too() -> None:
    """This is Gloo's message for the second of two operations under way, where the first one timed out."""
    explained = explain_communication_error(
        RuntimeError("Application timeout caused pair closure"), RANK_1, Heartbeat.in_memory(), 2, None
    )
    assert str(explained) == "rank 1, communication (start-up): no answer within 2 s"


def test_a_wrapped_error_is_recognized() -> None:
    error = ValueError("saving failed")
    error.__cause__ = dist.DistBackendError("NCCL error: remote process exited")
    assert explain_communication_error(error, RANK_1, Heartbeat.in_memory(), 2, None) is not None


@pytest.mark.parametrize(
    "error",
    [
        ValueError("gloo"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        TimeoutError("the mirror"),
    ],
)
def test_other_errors_are_not_explained(error: Exception) -> None:
    assert explain_communication_error(error, RANK_1, Heartbeat.in_memory(), 2, None) is None
