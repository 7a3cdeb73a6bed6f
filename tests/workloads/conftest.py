"""Generated data sets are written once to a temporary cache folder, never to the user's cache."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folder_of_generated_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", autouse=True)
def _cache(folder_of_generated_data: Path) -> Iterator[None]:
    """Tests of other folders that run in this process afterwards have their own cache again, in which this machine is
    measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder_of_generated_data))
        yield
