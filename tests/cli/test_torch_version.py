"""Versions of torch that were not tried."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from meshwright import version

REPOSITORY = Path(__file__).parents[2]
LINE = (
    "Meshwright 0.1.0 uses private interfaces of torch and was tried with 2.11 to 2.15: if something fails, pip install"
)
IMPORT_TORCH = "import sys, torch; torch.__version__ = type(torch.__version__)({!r});"
REMOVE = "del torch.utils._pytree.tree_leaves;"  # meshwright/profile/torch_private.py imports it
SCRIPT = "import meshwright as mw; mw.predict"
COMMAND = "sys.argv[1:] = ['plan', 'linear', '--cluster', '2xH100', '--json']; from meshwright.cli import main; main()"


def run(torch_version: str, *code: str) -> subprocess.CompletedProcess[str]:
    text = "".join((IMPORT_TORCH.format(torch_version), *code))
    return subprocess.run([sys.executable, "-c", text], cwd=REPOSITORY, capture_output=True, text=True, timeout=250)


@pytest.mark.parametrize("tried", ["2.11.0", "2.13.0+cpu", "2.15.1+cu130", "2.14.0a0+git1", "unknown"])
def test_nothing_is_said_about_a_version_that_was_tried(tried: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", tried)
    assert version.untried_torch() is None


@pytest.mark.parametrize("untried", ["2.10.1", "2.16.0.dev20261101+cpu", "3.0.0"])
def test_a_version_that_was_not_tried_is_named(untried: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", untried)
    assert str(version.untried_torch()).startswith(f"torch {untried} is installed, but {LINE}")


def test_a_newer_torch_is_used_after_one_line() -> None:
    ended = run("2.16.0", COMMAND)
    assert ended.returncode == 0
    assert ended.stderr.count(LINE) == 1
    assert ended.stderr.startswith("meshwright:0: RuntimeWarning: torch 2.16.0 is installed, but")


def test_a_command_says_what_a_newer_torch_lacks() -> None:
    ended = run("2.16.0", REMOVE, COMMAND)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert "cannot import name 'tree_leaves'" in ended.stderr.splitlines()[-1]
    assert 'pip install "torch>=2.11,<2.16"' in ended.stderr.splitlines()[-1]


def test_an_error_of_an_import_names_the_versions_that_were_tried() -> None:
    ended = run("2.16.0", REMOVE, SCRIPT)
    assert "ImportError: cannot import name 'tree_leaves'" in ended.stderr
    assert LINE in ended.stderr.splitlines()[-1]
    assert LINE not in run("2.15.0", REMOVE, SCRIPT).stderr


def test_the_package_requires_what_was_tried() -> None:
    (required,) = (
        text
        for text in tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
        if text.startswith("torch")
    )
    (oldest, newest), (major, minor) = version.OLDEST_TORCH, version.NEWEST_TORCH
    assert required == f"torch>={oldest}.{newest},<{major}.{minor + 1}"
