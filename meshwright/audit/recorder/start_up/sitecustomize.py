"""Python imports this file when a recorded process starts, because its folder stands first on PYTHONPATH. It waits for
torch to be imported, and starts the recorder then. Afterwards it runs the `sitecustomize` that it hides, if any."""

import importlib.machinery
import importlib.util
import os
import sys

_NAME = "_meshwright_recorder"
_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _start_recorder() -> None:
    package = os.path.dirname(_FOLDER)
    spec = importlib.util.spec_from_file_location(
        _NAME, os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)
    importlib.import_module(_NAME + ".imports").watch_imports()


def _run_hidden() -> None:
    path = [entry for entry in sys.path if os.path.abspath(entry or ".") != _FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("MESHWRIGHT_AUDIT_RECORD"):
    _start_recorder()
_run_hidden()
