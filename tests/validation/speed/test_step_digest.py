"""The digest of the step's files changes with each of them, and the tests say when the table has another one."""

import json
import shutil
from pathlib import Path

import pytest

from validation.speed.step_digest import PACKAGE, STEP_FILES, step_digest, step_files, table_state


@pytest.fixture
def package(tmp_path: Path) -> Path:
    copy = tmp_path / "meshwright"
    for file in step_files():
        target = copy / file.relative_to(PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    return copy


def test_each_pattern_has_files_and_the_step_is_among_them() -> None:
    assert [pattern for pattern in STEP_FILES if not list(PACKAGE.glob(pattern))] == []
    names = {file.relative_to(PACKAGE).as_posix() for file in step_files()}
    assert {"train/session.py", "train/step/cuda_graphs.py", "parallel/precision.py", "parallel/compiled.py"} <= names
    assert not any(name.startswith(("parallel/pipeline/", "simulator/", "train/servers/")) for name in names)


def test_the_digest_changes_with_a_file_its_name_and_its_absence(package: Path) -> None:
    digest = step_digest(package)
    assert digest == step_digest() == step_digest(package)
    (package / "parallel" / "notes.txt").write_text("no code")
    assert step_digest(package) == digest
    file = package / "train" / "step" / "cuda_graphs.py"
    content = file.read_text()
    file.write_text(f"{content}# changed\n")
    changed = step_digest(package)
    file.rename(file.with_name("renamed.py"))
    renamed = step_digest(package)
    file.with_name("renamed.py").unlink()
    assert len({digest, changed, renamed, step_digest(package)}) == 4


def test_the_state_of_the_table(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    assert "has no rows yet" in (table_state(table) or "")
    table.write_text(json.dumps([{"digest": step_digest()}]))
    assert table_state(table) is None
    table.write_text(json.dumps([{"digest": step_digest()}, {"digest": "other"}]))
    assert "other files of the step (1 of 2 models)" in (table_state(table) or "")
