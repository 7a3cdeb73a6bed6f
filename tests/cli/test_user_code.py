"""A command that runs the user's code ends with exit code 1, the user's file and line where that code fails, and never
with a success or a traceback of ours."""

from pathlib import Path

import pytest

from meshwright.user import code as user_code
from tests.cli.commands import RunCommand
from tests.soaked import all_but

NET = """
import os, sys
from torch import nn

class Net(nn.Linear):
    def __init__(self):
        super().__init__(20, 5)
        {constructor}

    def forward(self, x):
        {forward}
        return super().forward(x)

{file}
"""
ENDINGS = {
    "exit()": "SystemExit: exit code 0",
    "sys.exit(0)": "SystemExit: exit code 0",
    "os._exit(0)": "SystemExit: exit code 0",
    "raise SystemExit": "SystemExit: exit code 0",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "raise GeneratorExit('over')": "GeneratorExit: over",
    "raise StopIteration": "StopIteration",
    "raise EOFError": "EOFError",
}
MODEL = "model.call=my_net.py:Net"


def write_net(folder: Path, **statements: str) -> int:
    """Writes `my_net.py` with a statement in one of its places, and returns the number of its line."""
    (place, statement) = next(iter(statements.items()))
    source = NET.format(**{**dict.fromkeys(("file", "constructor", "forward"), "pass"), place: statement})
    (folder / "my_net.py").write_text(source)
    return source.split(statement)[0].count("\n") + 1


@pytest.mark.parametrize("statement", ENDINGS)
@pytest.mark.parametrize("place", ["file", "constructor"])
@pytest.mark.parametrize("command", all_but({"train"}, ["train", "plan"]))
def test_a_model_that_ends_the_program_is_an_error(
    folder: Path, run_command: RunCommand, command: str, place: str, statement: str
) -> None:
    line = write_net(folder, **{place: statement})
    result = run_command(command, "job.yaml", "--json", "--set", MODEL, "--cluster", "2xcpu")
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"failed: {ENDINGS[statement]} (" in result.stderr
    assert result.stderr.endswith(f"my_net.py, line {line})\n")
    assert result.stderr.count("\n") == 1, result.stderr


@pytest.mark.parametrize("statement", ["exit()", "os._exit(0)", "raise GeneratorExit('over')"])
def test_a_forward_function_that_ends_the_program_is_an_error(
    folder: Path, run_command: RunCommand, statement: str
) -> None:
    line = write_net(folder, forward=statement)
    result = run_command("plan", "job.yaml", "--json", "--set", MODEL, "--cluster", "8xH100")
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"{ENDINGS[statement]} (" in result.stderr
    assert result.stderr.endswith(f"my_net.py, line {line})\n")


@pytest.mark.parametrize(
    ("statement", "words"), [("raise StopIteration", "StopIteration"), ("raise ValueError('odd')", "odd")]
)
def test_a_forward_function_that_cannot_be_traced_is_named_with_its_line(
    folder: Path, run_command: RunCommand, statement: str, words: str
) -> None:
    line = write_net(folder, forward=statement)
    result = run_command("plan", "job.yaml", "--json", "--set", MODEL, "--cluster", "8xH100")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"the model cannot be traced in its forward pass (Net): {words} (" in result.stderr
    assert f"my_net.py, line {line})" in result.stderr


def test_an_exception_of_the_users_code_is_one_line(folder: Path, run_command: RunCommand) -> None:
    """The model cannot be built at all, which the check of a pipeline notices outside of any rank."""
    line = write_net(folder, constructor="raise ValueError('no\\n such size')")
    plan = "plan={axes: {tensor: 2}}"
    result = run_command("train", "job.yaml", "--set", MODEL, "--set", plan)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("meshwright: the job's code failed: ValueError: no such size (")
    assert result.stderr.endswith(f"my_net.py, line {line})\n")


def test_a_long_import_is_announced(folder: Path, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "SLOW_S", 0.05)
    waiting = "import threading; [t.join() for t in threading.enumerate() if isinstance(t, threading.Timer)]"
    write_net(folder, file=f"{waiting}; exit()")
    result = run_command("plan", "job.yaml", "--json", "--set", MODEL, "--cluster", "8xH100")
    assert (result.exit_code, result.stdout) == (1, "")
    announced, failed = result.stderr.splitlines()
    assert announced == "importing my_net.py since 0.05 s"
    assert failed.startswith("meshwright: ")
