"""Runs `meshwright train` as a process, which tests kill, stop and wait for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from meshwright.train.output.folder import RunFolder
from tests.forking.forked import Process, start_command


def start(folder: Path, job: Mapping[str, Any], ranks: int, *options: str) -> tuple[Process, RunFolder]:
    """Starts the job on so many CPU ranks in `folder`. Returns the process and the run folder."""
    words, run_folder = write_job(folder, job, ranks)
    return start_command([*words, *options]), run_folder


def write_job(folder: Path, job: Mapping[str, Any], ranks: int) -> tuple[list[str], RunFolder]:
    """Writes the job, for so many CPU ranks, to `folder`. Returns the words of the command that trains it, after
    `meshwright`, and the run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "toy.yaml"
    file.write_text(yaml.safe_dump({"cluster": f"{ranks}xcpu", "output": str(folder / "runs"), **job}))
    return ["train", str(file), "--json"], RunFolder(folder / "runs" / "toy-0001")


def finish(process: Process, steps: int) -> tuple[dict[str, Any], str]:
    """Waits for the process, checks that it made so many steps, and returns its result and what it printed to
    stderr."""
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert result["steps"] == steps
    return result, err
