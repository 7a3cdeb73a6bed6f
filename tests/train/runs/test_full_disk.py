"""A disk that is full, read-only or gone during a training is named in one line, and the last checkpoint stays. The
disks are small ones that a process of its own mounts, see full_disk.py."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ADVICE = "; free some space there, or choose an output folder on another disk"


def outcomes(folder: Path, ranks: int, *cases: str) -> dict[str, list[dict[str, Any]]]:
    """Runs the cases on so many ranks, and returns what they printed, by case. Skips the test where nothing may be
    mounted."""
    isolated = ["unshare", "--map-root-user", "--mount"]
    try:
        subprocess.run([*isolated, "mount", "-t", "tmpfs", "tmpfs", folder], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk can be mounted here: {error}")
    command = [*isolated, sys.executable, "-m", "tests.train.runs.full_disk", str(folder), str(ranks), *cases]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr
    assert "start again" not in run.stderr, run.stderr  # a restart would only fail again
    return dict(json.loads(line) for line in run.stdout.splitlines())


def check_full_at_a_later_save(case: list[dict[str, Any]], disk: Path, ranks: int) -> None:
    full, resumed = case
    step = 6 if ranks == 2 else 4
    assert full["class"] == "StorageError"
    assert re.fullmatch(
        rf"rank \d failed at step {step} \(save\): {disk}/runs/toy-0001/checkpoints: the disk mounted at {disk}"
        rf" \(tmpfs, 4 MiB\) is full: 1\.\d+ MiB are needed, \d+ KiB are free, \d+ KiB are missing{ADVICE}",
        full["error"],
    ), full["error"]
    assert (full["step"], full["names"]) == (step - 2, [f"step-{step - 2:08d}"])
    assert (resumed["class"], resumed["step"], resumed["names"]) == (None, 20, ["step-00000020"])


def check_deleted(case: list[dict[str, Any]], disk: Path) -> None:
    (outcome,) = case
    assert outcome["class"] == "StorageError"
    assert f"{disk}/runs/toy-0001 does not exist: create it, or choose another output folder" in outcome["error"]
    assert outcome["names"] == []  # nothing was created again


@pytest.mark.soak
def test_a_full_disk_and_a_deleted_folder_are_named_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    cases = outcomes(tmp_path, 2, "later_save", "deleted")
    check_full_at_a_later_save(cases["later_save"], tmp_path / "later_save", 2)
    check_deleted(cases["deleted"], tmp_path / "deleted")


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
def test_whatever_happens_to_the_disk_is_named(tmp_path: Path, ranks: int) -> None:
    cases = outcomes(tmp_path, ranks, "first_save", "later_save", "metrics", "events", "read_only", "deleted")
    check_full_at_a_later_save(cases["later_save"], tmp_path / "later_save", ranks)
    check_deleted(cases["deleted"], tmp_path / "deleted")
    (first_save,) = cases["first_save"]
    assert " failed at step 10 (save): " in first_save["error"]
    assert (first_save["step"], first_save["names"]) == (None, [])
    for case, file in (("metrics", "metrics.jsonl"), ("events", "(metrics.jsonl|events)")):
        (outcome,) = cases[case]
        assert outcome["class"] == "StorageError"
        assert re.search(
            rf"rank 0 failed at step \d+ \(log\): \S+/{file}: the disk mounted at \S+ .* is full", outcome["error"]
        )
    (read_only,) = cases["read_only"]
    run = tmp_path / "read_only" / "runs" / "toy-0001"
    assert f"the disk mounted at {run} (tmpfs, 4 MiB) is read-only" in read_only["error"]
    assert read_only["names"] == [f"step-{read_only['step']:08d}"]
