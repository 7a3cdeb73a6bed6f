from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def open_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that other users can look into."""
    parents = [parent for parent in tmp_path.parents if parent.stat().st_mode & 0o055 == 0]
    modes = {parent: parent.stat().st_mode & 0o777 for parent in (*parents, tmp_path)}
    for parent in modes:
        parent.chmod(0o755)
    yield tmp_path
    for parent, mode in modes.items():
        parent.chmod(mode)
