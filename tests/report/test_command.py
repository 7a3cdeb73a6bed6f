"""`meshwright report` and `meshwright watch` on the command line, as docs/report.md says."""

import json
import shlex
from pathlib import Path

import pytest

from documentation.blocks import REPOSITORY, find_blocks
from tests.cli.commands import CommandResult, run_in_process
from tests.report.made_up_run import make_run

PAGE = "docs/report.md"
RUN = "runs/mnist-0001"


def commands_of_page() -> list[list[str]]:
    """The commands of the page's first block, without the one that does not end and the one that needs a browser."""
    block = next(iter(find_blocks(PAGE, (REPOSITORY / PAGE).read_text())))
    words = [shlex.split(line, comments=True) for line in block.text.splitlines() if line.startswith("meshwright")]
    return [line[1:] for line in words if line[1] == "report" and "--figures" not in line]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_run(tmp_path / RUN, ranks=2, steps=30)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> CommandResult:
    return run_in_process(monkeypatch, capsys, arguments)


def test_the_commands_of_the_page_write_what_they_say(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, named, traced = (run_in_process(monkeypatch, capsys, tuple(words)) for words in commands_of_page())
    assert (plain.exit_code, named.exit_code, traced.exit_code) == (0, 0, 0), plain.stderr + named.stderr
    assert (folder / RUN / "report.html").is_file()
    assert json.loads(named.stdout.splitlines()[-1]) == {"html": str(folder / "page.html")}
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["report", "missing"], "missing: there is no such file or folder"),
        (["report", "."], "it has no job.yaml"),
        (["report", RUN, "--output", "."], "this is a folder"),
        (["report", RUN, "--trace", "missing/trace.json"], "there is no folder missing"),
        (["report", RUN, "--memory-snapshot", "m.pickle"], "no steps were profiled"),
        (["watch", RUN, "--address", "0.0.0.0"], "--address 0.0.0.0: the page is served on 127.0.0.1 only"),
        (["watch", "."], "it has no job.yaml"),
        (["train", "mnist", "--profile-steps", "3"], "--profile-steps 3: write the first step"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    words: list[str],
    problem: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lowered: list[int] = []  # `watch` lets the ranks of the machine go first, which a process of tests should not
    monkeypatch.setattr("meshwright.cli.watch.os.nice", lowered.append)
    result = run(monkeypatch, capsys, *words)
    assert bool(lowered) == (words[0] == "watch")
    assert result.exit_code == 2
    assert problem in result.stderr
    assert result.stderr.count("\n") == 1
