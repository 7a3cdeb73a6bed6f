"""Runs commands in the process of the test, as the entry point `meshwright` does."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import main

JOB: dict[str, Any] = {
    "model": {"call": "tests.train.toy:Net"},
    "data": {"train": {"call": "tests.train.toy:points"}, "eval": {"call": "tests.train.toy:points", "size": 50}},
    "loss": {"call": "torch.nn.functional:cross_entropy"},
    "metrics": {"accuracy": {"call": "meshwright.train.metrics:accuracy"}},
    "optimizer": {"call": "torch.optim:SGD", "lr": 0.1},
    "schedule": {"call": "torch.optim.lr_scheduler:StepLR", "step_size": 1},
    "train": {"epochs": 1, "global_batch": 30},
    "cluster": "2xcpu",
}


@dataclass(frozen=True)
class CommandResult:
    exit_code: int
    stdout: str
    stderr: str


RunCommand = Callable[..., CommandResult]  # takes the words of the command line after `meshwright`
RefusalOf = Callable[..., str]  # takes the same words, and returns the one line on stderr


def run_in_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> CommandResult:
    monkeypatch.setattr(sys, "argv", ["meshwright", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    captured = capsys.readouterr()
    return CommandResult(int(end.value.code or 0), captured.out, captured.err)


def file_names(folder: Path) -> set[str]:
    """Returns the relative paths of everything below the folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}
