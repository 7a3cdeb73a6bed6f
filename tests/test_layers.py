"""Checks the table of levels in docs/design.md: a package imports only packages of lower levels, and no file imports
itself through other files. The folders inside a package have an order, too; files directly in the package may be below
its folders (shared values) or above them (code that combines them). Files and folders of the package, of `tests/`, of
`validation/` and of `documentation/` are small enough to read as one."""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import meshwright

PACKAGE = Path(meshwright.__file__).parent
REPOSITORY = Path(__file__).parents[1]

LEVELS = {
    "cli": 8,
    "report": 7,
    "selftest": 7,
    "compat": 7,
    "proof": 6,
    "audit": 6,
    "bench": 6,
    "export": 6,
    "auto": 5,
    "planner": 4,
    "train": 4,
    "checkpoint": 3,
    "calibrate": 3,
    "zoo": 3,
    "simulator": 2,
    "parallel": 2,
    "workloads": 2,
    "cluster": 1,
    "profile": 1,
    "collectives": 1,
    "data": 1,
    "processes": 1,
    "job": 1,
    "blocks": 0,
    "plan": 0,
    "plan_fields": 0,
    "plan_rules": 0,
    "doors": 0,
    "dtypes": 0,
    "model_io": 0,
    "messages": 0,
    "progress": 0,
    "files": 0,
    "errors": 0,
    "numbers": 0,
    "user": 0,
    "version": 0,
}
# The folders inside a package, from the lowest to the highest: each may import those before it.
FOLDERS = {
    "audit": ("recorder", "causes", "comparison", "from_python"),
    "bench": ("strategies",),
    "calibrate": ("system",),
    "cli": ("checks", "launchers", "questions"),
    "collectives": ("schedules", "shared_memory"),
    "compat": ("deepspeed_config", "accelerate", "deepspeed", "horovod", "lightning", "ray", "transformers"),
    "data": ("collate",),
    "export": ("configurations", "launch_files"),
    "processes": ("token", "network", "launchers", "stall", "local", "nodes"),
    "parallel": ("weights", "tensor", "context", "pipeline", "branches", "replicate", "expert", "chunked_loss"),
    "planner": ("constraints", "unequal", "polish", "explanation", "questions"),
    "profile": ("structure", "tracing"),
    "proof": ("reference", "record", "compare", "causes", "before_training"),
    "report": ("run", "plans", "benches"),
    "simulator": ("compute", "tensor", "communication", "pipeline", "memory"),
    "train": ("shares", "loss", "loop_checks", "drive", "step", "output", "callbacks", "servers", "tuning"),
    "workloads": ("text", "images", "segmentation", "recommender", "physics"),
}
ENTRY_POINTS = ("__init__", "__main__")  # they may import anything, and nothing may import them
# The files of level 0 that other files of level 0 may import.
SHARED_BY_LEVEL_0 = (
    *("errors", "dtypes", "files", "numbers"),
    *("doors", "plan_fields", "plan_rules", "user", "version"),
)
PREDICTING, EXECUTING = {"simulator", "planner"}, {"parallel", "checkpoint", "train"}
READ_NODES = (ast.Import, ast.ImportFrom, ast.Attribute, ast.Constant, ast.Call)  # the syntax that the checks look at
MOST_FILES = 15  # directly in one folder, without `__init__.py`
MOST_LINES = 400


def layer_problems(package: Path) -> list[str]:
    """Returns every breach of the table, and of the sizes, in a package called meshwright."""
    problems: list[str] = []
    imports: dict[str, set[str]] = {}
    for file in sorted(package.rglob("*.py")):
        module_path = file.relative_to(package).with_suffix("").parts
        subpackage = module_path[0]
        name = f"{package.name}/{file.relative_to(package)}"
        tree = ast.parse(file.read_text())
        nodes = [node for node in ast.walk(tree) if isinstance(node, READ_NODES)]
        imports[_module_name(package, file)] = modules = set(imported(nodes, module_path))
        if subpackage in ENTRY_POINTS:
            continue
        if subpackage not in LEVELS:
            problems.append(f"{name}: '{subpackage}' is not in the design's table")
            continue
        for module in sorted(modules):
            reasons = (*_level_breaches(subpackage, module), *_folder_breaches(module_path, module))
            problems += [f"{name}: {reason}" for reason in reasons]
    return problems + _import_cycles(imports) + size_problems(package)


def _level_breaches(importer: str, module: str) -> Iterator[str]:
    package, _, path = module.partition(".")
    imported = path.split(".")[0]
    if package != "meshwright" or imported == importer:
        return
    if imported in ENTRY_POINTS or not imported:
        yield "imports an entry point"
    elif imported not in LEVELS:
        yield f"imports '{imported}', which is not in the design's table"
    elif {importer, imported} & PREDICTING and {importer, imported} & EXECUTING:
        yield f"{importer} and {imported}: predicting and executing meet in the plan only"
    elif LEVELS[imported] >= LEVELS[importer] and imported not in SHARED_BY_LEVEL_0:
        yield f"{importer} (level {LEVELS[importer]}) imports {imported} (level {LEVELS[imported]})"


def _folder_breaches(importer_path: tuple[str, ...], module: str) -> Iterator[str]:
    """Yields a reason if a folder imports one above it in its package, or if the table does not have the folder."""
    subpackage, *folder_and_file = module.split(".")[1:] or [""]
    if len(importer_path) < 3:
        return
    folders = FOLDERS.get(importer_path[0], ())
    if importer_path[1] not in folders:
        yield f"folder '{importer_path[1]}' of {importer_path[0]} is not in the table"
        return
    folders_above = folders[folders.index(importer_path[1]) + 1 :]
    if subpackage == importer_path[0] and set(folder_and_file[:1]) & set(folders_above):
        yield f"{subpackage}/{importer_path[1]} imports {subpackage}/{folder_and_file[0]}, which lies above it"


def _import_cycles(imports: dict[str, set[str]]) -> list[str]:
    """Returns the files that import each other, directly or through other files, from what each file imports."""
    # A file that imports none of the remaining files, or that none of them imports, is in no cycle.
    while True:
        remaining = {name for name, imported in imports.items() if imported & imports.keys()}
        remaining &= {name for imported in imports.values() for name in imported}
        if remaining == imports.keys():
            return [f"{name} is in a circle of imports" for name in sorted(remaining)]
        imports = {name: imported for name, imported in imports.items() if name in remaining}


def _module_name(package: Path, file: Path) -> str:
    parts = [package.name, *file.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def size_problems(root: Path) -> list[str]:
    """Returns the files and folders below `root` that are too large to be read as one."""
    problems = []
    for folder in (root, *(path for path in root.rglob("*") if path.is_dir() and path.name != "__pycache__")):
        files = [file for file in folder.iterdir() if file.is_file() and file.name != "__init__.py"]
        if len(files) > MOST_FILES:
            problems.append(f"{folder.name}/ has {len(files)} files, more than {MOST_FILES}")
        for file in files:
            if file.suffix == ".py" and (lines := file.read_text().count("\n")) > MOST_LINES:
                problems.append(f"{file.relative_to(root)} has {lines} lines, more than {MOST_LINES}")
    return problems


def imported(nodes: Iterable[ast.AST], importer_path: tuple[str, ...]) -> Iterator[str]:
    """Yields the dotted names of imported modules; `from meshwright import errors` is meshwright.errors."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ["meshwright", *importer_path[: len(importer_path) - node.level]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{module}.{alias.name}" if _is_module(module, alias.name) else module


@cache
def _is_module(module: str, name: str) -> bool:
    """Returns whether `from module import name` imports a file or folder called `name`."""
    if module == "meshwright":
        return True
    folder = PACKAGE.parent.joinpath(*module.split("."))
    return (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()


def test_imports_flow_down_only() -> None:
    assert layer_problems(PACKAGE) == []


@pytest.mark.parametrize("folder", ["tests", "validation", "documentation"])
def test_files_and_folders_beside_the_package_are_small(folder: str) -> None:
    assert size_problems(REPOSITORY / folder) == []


def test_every_package_has_a_level() -> None:
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert names - set(ENTRY_POINTS) == set(LEVELS), "the table lists exactly the packages that exist"
    folders = {name: {path.parent.name for path in PACKAGE.glob(f"{name}/*/__init__.py")} for name in names}
    assert {name: inside for name, inside in folders.items() if inside} == {
        name: set(inside) for name, inside in FOLDERS.items()
    }


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("data/order.py", "from meshwright.train.session import Session", "data (level 1) imports train (level 4)"),
        ("data/order.py", "from meshwright import train", "data (level 1) imports train (level 4)"),
        ("data/order.py", "from ..train import session", "data (level 1) imports train (level 4)"),
        ("data/order.py", "import meshwright.processes.world", "data (level 1) imports processes (level 1)"),
        ("data/order.py", "def late():\n    from meshwright.job import Job", "data (level 1) imports job (level 1)"),
        ("planner/search.py", "from meshwright.parallel.apply import apply", "predicting and executing"),
        ("train/trainer.py", "from meshwright.simulator.memory.peak import peak", "predicting and executing"),
        ("train/trainer.py", "from meshwright.cli import app", "train (level 4) imports cli (level 8)"),
        ("plan.py", "from meshwright.model_io.batch import Batch", "plan (level 0) imports model_io (level 0)"),
        ("parallel/tensor/a.py", "from meshwright.parallel.pipeline.b import b", "parallel/pipeline, which lies above"),
        ("parallel/a/b.py", "import ast", "folder 'a' of parallel is not in the table"),
        ("plan.py", "\n" * 401, "plan.py has 401 lines, more than 400"),
        ("utils/text.py", "", "'utils' is not in the design's table"),
        ("data/order.py", "from meshwright.utils import text", "imports 'utils'"),
        ("data/order.py", "import meshwright", "imports an entry point"),
    ],
)
def test_a_breach_is_caught(tmp_path: Path, file: str, line: str, complaint: str) -> None:
    wrong_file = tmp_path / "meshwright" / file
    wrong_file.parent.mkdir(parents=True)
    wrong_file.write_text(line)
    assert complaint in "\n".join(layer_problems(tmp_path / "meshwright"))


def test_a_circle_of_imports_is_caught(tmp_path: Path) -> None:
    package = tmp_path / "meshwright"
    (package / "data").mkdir(parents=True)
    for name, imported in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")):
        (package / "data" / f"{name}.py").write_text(f"def late():\n    from meshwright.data.{imported} import x")
    cycle = [line for line in layer_problems(package) if "circle" in line]
    assert cycle == [f"meshwright.data.{name} is in a circle of imports" for name in "abc"]


def test_a_folder_of_too_many_files_is_caught(tmp_path: Path) -> None:
    folder = tmp_path / "meshwright" / "data"
    folder.mkdir(parents=True)
    for number in range(16):
        (folder / f"part{number}.py").write_text("")
    assert "data/ has 16 files, more than 15" in layer_problems(tmp_path / "meshwright")


@pytest.mark.parametrize("name", ["tests", "validation"])
def test_a_large_file_or_folder_beside_the_package_is_caught(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name / "data"
    folder.mkdir(parents=True)
    (folder / "test_order.py").write_text("\n" * 401)
    for number in range(15):
        (folder / f"rows{number}.json").write_text("")
    assert size_problems(tmp_path / name) == [
        "data/ has 16 files, more than 15",
        "data/test_order.py has 401 lines, more than 400",
    ]


def test_imports_that_the_table_allows_are_accepted(tmp_path: Path) -> None:
    package = tmp_path / "meshwright"
    (package / "processes").mkdir(parents=True)
    (package / "processes" / "environment.py").write_text("import os\nrank = os.environ['RANK']")
    (package / "dtypes.py").write_text("from meshwright.errors import InputError\ndef late():\n    import torch")
    (package / "cli.py").write_text("from meshwright.planner.search import best\nfrom meshwright.train.run import t")
    (package / "__init__.py").write_text("from meshwright.train.session import Session")
    assert layer_problems(package) == []
