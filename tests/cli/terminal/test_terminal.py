"""What commands print on a terminal of 80 and 100 columns, and in a pipe."""

import io
import os
import pty
import re
import sys
import threading
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

from meshwright.auto.inputs import model_planning_inputs
from meshwright.cli import main
from meshwright.cluster.detect import find_cluster
from meshwright.plan import Plan
from meshwright.planner.explanation.report import PlanReport, report_search, show
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.offload import search_with_offload
from meshwright.progress import wrapped
from tests.train.toy import Net

BREAKDOWN = ("compute", "start", "exchange", "bubble", "other")
Report = tuple[PlanReport, PlanningInputs]


@pytest.fixture(scope="module")
def report() -> Report:
    batch = torch.zeros(2, 20), torch.zeros(2, dtype=torch.long)
    inputs, profiles = model_planning_inputs(
        Net(), batch, find_cluster("8xH100"), global_batch=64, loss=torch.nn.functional.cross_entropy
    )
    return report_search(search_with_offload(inputs, profiles), inputs, profiles), inputs


def _shown(report: Report, columns: int, *, terminal: bool, full: bool = False) -> str:
    file = io.StringIO()
    show(*report, Console(file=file, width=columns, force_terminal=terminal, color_system=None), 1.0, full)
    return re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())


@pytest.mark.parametrize("columns", [80, 100])
def test_the_report_of_a_plan_fits_and_breaks_between_words(report: Report, columns: int) -> None:
    text = _shown(report, columns, terminal=True)
    assert max(map(len, text.splitlines())) <= columns
    words = set(text.split())
    for sentence in report[0].explanation:
        assert set(sentence.split()) <= words, sentence


def test_in_a_pipe_a_sentence_is_a_line(report: Report) -> None:
    text = _shown(report, 100, terminal=False)
    assert "\x1b" not in text
    assert set(report[0].explanation) <= set(text.splitlines())


@pytest.mark.parametrize("columns", [80, 100])
def test_the_columns_of_the_breakdown_add_up(report: Report, columns: int) -> None:
    lines = _shown(report, columns, terminal=False).splitlines()
    header = next(number for number, line in enumerate(lines) if "samples/s" in line and "compute" in line)
    end = lines.index("", header)
    rows = [shares for line in lines[header + 1 : end] if (shares := re.findall(r"(\d+)%", line))]
    ranked = [plan for plan, _ in report[0].ranked]
    plain = [plan.priced.plan for plan in report[0].headline.plain if plan.priced is not None]
    assert len(rows) == len(ranked) + sum(plan not in ranked for plan in plain)
    assert "start" in lines[header].split()
    assert all(sum(map(int, row)) == 100 for row in rows)


def test_numbers_and_words_can_be_read_at_once(report: Report) -> None:
    text = _shown(report, 100, terminal=False)
    assert not re.search(r"\de[+-]\d", text)
    assert "based on data sheets of the hardware" in text
    assert " a H100" not in text


def test_the_plan_shows_what_differs_unless_all_is_asked_for(report: Report) -> None:
    for full in (False, True):
        text = _shown(report, 100, terminal=False, full=full)
        plan = text[text.index("# the best plan") :]
        assert Plan.model_validate(yaml.safe_load(plan)) == report[0].ranked[0][0]
        assert ("staleness" in plan) == full


def _on_terminal(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """Runs a command in this process with a terminal as stdout and stderr, and returns what it printed."""
    ours, theirs = pty.openpty()
    printed = bytearray()

    def read() -> None:
        try:
            while chunk := os.read(ours, 65536):
                printed.extend(chunk)
        except OSError:  # the other end was closed
            return

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["meshwright", *arguments])
        patch.setattr(sys, "stdout", terminal)
        patch.setattr(sys, "stderr", terminal)
        with pytest.raises(SystemExit):
            main()
        terminal.flush()
    reader.join()
    os.close(ours)
    return printed.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("columns", [80, 100])
def test_messages_and_lists_fit_the_terminal(monkeypatch: pytest.MonkeyPatch, folder: Path, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    error = ("train", "job.yaml", "--set", "train.global_batch=many", "--set", f"output={'a/' * 10}")
    for command in (("jobs",), error):
        text = _on_terminal(monkeypatch, *command)
        assert text.strip()
        assert max(map(len, text.splitlines())) <= columns


def test_long_lines_are_wrapped_and_long_words_are_not() -> None:
    path = str(Path("/") / ("long" * 10))
    assert wrapped(f"  run  in {path} and more", 20) == f"  run  in\n    {path}\n    and more"
    assert wrapped("", 20) == ""
