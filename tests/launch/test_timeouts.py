"""Errors of communication become one line with names; all others are left alone."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.launch.place import Place
from meshwright.launch.timeouts import explain
from meshwright.launch.world import World

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"
HERE = World(1, 1, 3, 3, 0, torch.device("cpu"), None)


def at(folder: Path, rank: int, step: int, doing: str) -> Place:
    place = Place.in_folder(folder, rank, attempt=0)
    place.at(step, doing)
    return place


def test_who_is_behind_is_named(tmp_path: Path) -> None:
    own = at(tmp_path, 1, 57, "backward")
    at(tmp_path, 0, 57, "backward")
    at(tmp_path, 2, 56, "evaluate")
    error = RuntimeError(f"{GLOO}unbound_buffer.cc:119] Timed out waiting 30000ms for recv operation to complete")
    told = explain(error, HERE, own, 30, tmp_path)
    assert str(told) == (
        "rank 1, step 57, gradient all-reduce (backward): no answer within 30 s;"
        " rank 2 was last seen at step 56 in evaluate"
    )


def test_who_is_gone_is_named(tmp_path: Path) -> None:
    own = at(tmp_path, 1, 57, "forward")
    at(tmp_path, 0, 56, "forward")
    script = (
        "from pathlib import Path; from meshwright.launch.place import Place;"
        f"Place.in_folder(Path({str(tmp_path)!r}), 2, 0).at(57, 'backward')"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=os.getcwd())
    told = explain(RuntimeError(f"{GLOO}pair.cc:547] Connection closed by peer"), HERE, own, 30, tmp_path)
    assert str(told) == (
        "rank 1, step 57, communication (forward): the connection broke;"
        " rank 2 is gone, last seen at step 57 in backward"
    )


def test_without_a_folder_only_the_own_place_is_known() -> None:
    told = explain(dist.DistStoreError("wait timeout after 2000ms, keys: /zz"), HERE, Place.nowhere(), 2, None)
    assert str(told) == "rank 1, communication (start-up): no answer within 2 s"


def test_ranks_of_other_machines_are_not_looked_for_among_the_processes_here(tmp_path: Path) -> None:
    own = at(tmp_path, 1, 57, "backward")
    far = dataclasses.replace(HERE, size=6)
    told = explain(RuntimeError("Timed out waiting 30000ms: gloo"), far, own, 30, tmp_path)
    assert str(told) == "rank 1, step 57, gradient all-reduce (backward): no answer within 30 s"


def test_what_follows_a_timeout_of_another_operation_is_one_too() -> None:
    """Gloo's words where the first of several operations under way timed out, and the second is waited for."""
    told = explain(RuntimeError("Application timeout caused pair closure"), HERE, Place.nowhere(), 2, None)
    assert str(told) == "rank 1, communication (start-up): no answer within 2 s"


def test_a_wrapped_error_is_recognized() -> None:
    error = ValueError("saving failed")
    error.__cause__ = dist.DistBackendError("NCCL error: remote process exited")
    assert explain(error, HERE, Place.nowhere(), 2, None) is not None


@pytest.mark.parametrize(
    "error",
    [
        ValueError("gloo"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        TimeoutError("the mirror"),
    ],
)
def test_other_errors_are_left_alone(error: Exception) -> None:
    assert explain(error, HERE, Place.nowhere(), 2, None) is None
