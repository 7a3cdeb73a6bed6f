"""What crashes in CI leaves a core file, whose stack is printed if the run fails."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forking.environment import REPOSITORY

CRASH = "import ctypes, sys; print('before'); sys.stdout.flush(); ctypes.string_at(0)"
PATTERN = Path("/proc/sys/kernel/core_pattern")

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(os.geteuid() != 0 or not os.access(PATTERN, os.W_OK), reason="only root sets core_pattern"),
    pytest.mark.skipif(shutil.which("gdb") is None, reason="gdb is not installed"),
]


def run(folder: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    script = REPOSITORY / ".ci" / "core_files.sh"
    environment = {**os.environ, "TMPDIR": str(folder)}
    words = [str(script), *command]
    return subprocess.run(words, capture_output=True, text=True, cwd=folder, env=environment, check=False)


def test_the_stack_of_a_crash_is_printed_if_the_command_fails(tmp_path: Path) -> None:
    before = PATTERN.read_text()
    result = run(tmp_path, sys.executable, "-c", CRASH)
    assert result.returncode == 128 + 11
    assert result.stdout.startswith("before\ncore file ")
    assert "string_at" in result.stdout
    assert "Thread 1" in result.stdout
    assert PATTERN.read_text() == before


def test_a_crash_in_a_command_that_succeeds_is_one_line(tmp_path: Path) -> None:
    result = run(tmp_path, "sh", "-c", f'{sys.executable} -c "{CRASH}"; exit 0')
    assert result.returncode == 0
    assert result.stdout.count("\n") == 2
    assert "core file " in result.stdout
    assert list(tmp_path.glob("*/core*")) == []
