"""The fixture `assert_same_training`, in the test of docs/how_to/audit.md and in others."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from documentation.blocks import find_blocks
from meshwright.audit.audit import AuditFailed, AuditRequest
from meshwright.audit.from_python.same_training import compare_trainings
from meshwright.errors import InputError

REPOSITORY = Path(__file__).parents[2]
DDP = Path(__file__).parent / "programs" / "ddp.py"
WRONG = """

def test_of_a_mistake(assert_same_training):
    assert_same_training(train, lambda record: train(record, parts=2), steps=2)
"""


def _pytest(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    file = folder / "test_parity.py"
    file.write_text(text)
    # An environment that was installed before the plugin was in pyproject.toml has not its entry point.
    plugin = "from meshwright.audit.from_python.pytest_fixture import assert_same_training\n"
    (folder / "conftest.py").write_text(plugin)
    command = [sys.executable, "-m", "pytest", "-q", str(file)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=120)


def test_the_entry_point_is_the_plugin() -> None:
    entries = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    assert hasattr(importlib.import_module(entries["meshwright"]), "assert_same_training")


def _example() -> str:
    page = "docs/how_to/audit.md"
    blocks = find_blocks(page, (REPOSITORY / page).read_text())
    (block,) = [block for block in blocks if block.detail == "tests/audit/test_fixture.py"]
    return block.text


def test_the_example_passes_and_a_mistake_in_it_is_readable(tmp_path: Path) -> None:
    passed = _pytest(tmp_path, _example())
    assert passed.returncode == 0, passed.stdout + passed.stderr
    failed = _pytest(tmp_path, _example().replace(" / parts)", ")") + WRONG)
    assert failed.returncode == 1
    assert "Not equal: the gradient of bias in step 1 is 1.00e+00 off" in failed.stdout
    assert "all gradients are 2 times the reference's" in failed.stdout
    assert "pytest_fixture.py" not in failed.stdout


def test_the_plugin_imports_no_torch() -> None:
    code = "import sys, meshwright.audit.from_python.pytest_fixture; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_function_that_records_nothing_and_a_command_that_fails_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the reference recorded nothing"):
        compare_trainings(lambda record: None, "", tmp_path / "a", AuditRequest("", ""))
    with pytest.raises(AuditFailed, match="called no model in training mode"):
        compare_trainings("python -c 1", "", tmp_path / "b", AuditRequest("", ""))


@pytest.mark.soak
def test_commands_and_folders_are_compared(tmp_path: Path) -> None:
    request = AuditRequest("", "", threads=1, timeout_s=120)
    ranks = f"torchrun --standalone --nproc-per-node 2 {DDP}"
    assert compare_trainings(f"python {DDP}", ranks, tmp_path / "a", request).equal
    recorded = tmp_path / "a" / "reference"
    assert compare_trainings(recorded, ranks, tmp_path / "b", request).equal
    wrong = compare_trainings(str(recorded), f"{ranks} --fault row", tmp_path / "c", request)
    assert not wrong.equal
    assert wrong.first_difference is not None
    assert len(wrong.first_difference.rows) == 1
