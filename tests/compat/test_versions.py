"""Packages for other libraries are imported only with versions of these that were tried."""

from importlib import import_module, reload
from importlib.metadata import PackageNotFoundError

import pytest

from meshwright.compat import versions

LIBRARIES = ["accelerate", "lightning", "transformers"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_other_versions_are_refused_when_the_package_is_imported(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    package = import_module(f"meshwright.compat.{library}")
    monkeypatch.setattr(versions, "version", lambda name: "0.1.2")
    with pytest.raises(ImportError, match=rf"{library} 0\.1\.2 is installed, but .* needs \d+\.\d+\.x: pip install"):
        reload(package)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError

    package = import_module(f"meshwright.compat.{library}")
    monkeypatch.setattr(versions, "version", missing)
    with pytest.raises(ImportError, match=rf"meshwright\.compat\.{library} needs the package {library}: pip install"):
        reload(package)
