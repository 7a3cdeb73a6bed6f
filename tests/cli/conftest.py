"""Fixtures that run commands in the process of the test, in a folder with a job."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

import meshwright.train.run
from meshwright import progress
from meshwright.processes.local import fork_server
from meshwright.user import code as user_code
from tests.cli.commands import JOB, CommandResult, RefusalOf, RunCommand, file_names, run_in_process


@pytest.fixture(autouse=True)
def _no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not add the lines of long phases and slow imports to what commands print."""
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 1e6)
    monkeypatch.setattr(user_code, "SLOW_S", 1e6)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with `job.yaml`, whose ranks must never be started."""

    def fail_on_start(*_: Any, **__: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(meshwright.train.run, "launch", fail_on_start)
    # Commands prepare the start of ranks with a new Python process that imports torch, which no test here uses.
    monkeypatch.setattr(fork_server, "preloaded", lambda module, spare=True: nullcontext())
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    return tmp_path


@pytest.fixture
def run_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCommand:
    """Runs `meshwright` with these arguments, and returns how it ended."""

    def run(*arguments: str) -> CommandResult:
        return run_in_process(monkeypatch, capsys, arguments)

    return run


@pytest.fixture
def refusal_of(folder: Path, run_command: RunCommand) -> RefusalOf:
    """Runs a command that must be refused, and returns the line that it prints. The exit code is 2, there is no other
    output, and the files of the folder stay as they were."""

    def run(*arguments: str) -> str:
        before = file_names(folder)
        result = run_command(*arguments)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.startswith("meshwright: ")
        assert result.stderr.count("\n") == 1, result.stderr
        assert "Traceback" not in result.stderr
        assert file_names(folder) == before
        return result.stderr

    return run
