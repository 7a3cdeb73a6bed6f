"""The design's table of levels: imports flow down only, rooms on one level do not import each other, and no file
imports itself through others. Within a room the folders have an order of their own; files that lie directly in the room
may be below its folders (shared values) or above them (what joins them)."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshwright

PACKAGE = Path(meshwright.__file__).parent

LEVELS = {
    "cli": 8,
    "proof": 6,
    "bench": 6,
    "export": 6,
    "auto": 5,
    "planner": 4,
    "train": 4,
    "checkpoint": 3,
    "calibrate": 3,
    "simulator": 2,
    "parallel": 2,
    "workloads": 2,
    "cluster": 1,
    "profile": 1,
    "collectives": 1,
    "data": 1,
    "launch": 1,
    "job": 1,
    "blocks": 0,
    "plan": 0,
    "call": 0,
    "batch": 0,
    "cache": 0,
    "dtypes": 0,
    "yaml_file": 0,
    "errors": 0,
}
# The folders inside a room, from the lowest up: each may import those before it.
FOLDERS = {
    "bench": ("collectives",),
    "collectives": ("schedules", "shared_memory"),
    "launch": ("local",),
    "parallel": ("weights", "tensor", "pipeline", "branches", "replicate"),
    "profile": ("structure", "tracing"),
    "proof": ("reference", "record", "compare", "causes"),
    "simulator": ("compute", "tensor", "communication", "pipeline", "memory"),
    "train": ("step", "output", "servers"),
    "workloads": ("text", "images"),
}
ENTRY_POINTS = ("__init__", "__main__")  # they may name anything, and nothing may name them
EVERYBODYS = ("errors", "dtypes")  # the files of level 0 that its other files may import
PREDICTING, EXECUTING = {"simulator", "planner"}, {"parallel", "checkpoint", "train"}
WITHOUT_TORCH = ("plan", "job", "errors", "call", "yaml_file")
MAY_READ_ENVIRONMENT = ("launch", "cache")  # `cache` reads XDG_CACHE_HOME and the home folder, and nothing else
READS_ENVIRONMENT = (
    *("environ", "environb", "getenv", "getenvb", "putenv"),
    *("expandvars", "expanduser", "home", "getuser"),  # of os.path, pathlib and getpass
)
MOST_FILES = 15  # directly in one folder, `__init__.py` apart
MOST_LINES = 400


def problems(package: Path) -> list[str]:
    """Every breach of the table in a package called meshwright."""
    found: list[str] = []
    for file in sorted(package.rglob("*.py")):
        inside = file.relative_to(package).with_suffix("").parts
        room = inside[0]
        where = f"{package.name}/{file.relative_to(package)}"
        tree = ast.parse(file.read_text())
        if room not in MAY_READ_ENVIRONMENT:
            found += [f"{where}:{line} reads the environment" for line in _environment(tree)]
        if inside[0] in WITHOUT_TORCH:
            names = [name for name in _imported(tree.body, inside) if name.split(".")[0] == "torch"]
            found += [f"{where} imports torch when it is loaded"] * bool(names)
        if room in ENTRY_POINTS:
            continue
        if room not in LEVELS:
            found.append(f"{where}: '{room}' is not in the design's table")
            continue
        for name in _imported(ast.walk(tree), inside):
            found += [f"{where}: {reason}" for reason in (*_breach(room, name), *_folder_breach(inside, name))]
    return found + _circles(package) + _sizes(package)


def _breach(room: str, name: str) -> Iterator[str]:
    package, _, rest = name.partition(".")
    other = rest.split(".")[0]
    if package != "meshwright" or other == room:
        return
    if other in ENTRY_POINTS or not other:
        yield "imports an entry point"
    elif other not in LEVELS:
        yield f"imports '{other}', which is not in the design's table"
    elif {room, other} & PREDICTING and {room, other} & EXECUTING:
        yield f"{room} and {other}: predicting and executing meet in the plan only"
    elif LEVELS[other] >= LEVELS[room] and other not in EVERYBODYS:
        yield f"{room} (level {LEVELS[room]}) imports {other} (level {LEVELS[other]})"


def _folder_breach(inside: tuple[str, ...], name: str) -> Iterator[str]:
    """A folder of a room that imports one above it, or that the table does not have."""
    room, *others = name.split(".")[1:] or [""]
    if len(inside) < 3:
        return
    folders = FOLDERS.get(inside[0], ())
    if inside[1] not in folders:
        yield f"folder '{inside[1]}' of {inside[0]} is not in the table"
    elif room == inside[0] and set(others[:1]) & set(folders[folders.index(inside[1]) + 1 :]):
        yield f"{inside[0]}/{inside[1]} imports {inside[0]}/{others[0]}, which lies above it"


def _circles(package: Path) -> list[str]:
    """Files that import each other, directly or through others."""
    files = {_module(package, file): file for file in package.rglob("*.py")}
    imports = {
        name: {
            one
            for one in _imported(ast.walk(ast.parse(file.read_text())), file.relative_to(package).with_suffix("").parts)
            if one in files
        }
        for name, file in files.items()
    }
    # Files that import nothing of what is left, and files that nothing of what is left imports, are in no circle.
    while True:
        left = {name for name, others in imports.items() if others & imports.keys()}
        left &= {one for others in imports.values() for one in others}
        if left == imports.keys():
            return [f"{name} is in a circle of imports" for name in sorted(left)]
        imports = {name: others for name, others in imports.items() if name in left}


def _module(package: Path, file: Path) -> str:
    parts = [package.name, *file.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _sizes(package: Path) -> list[str]:
    """Files and folders that are too large to be read as one."""
    found = []
    for folder in (package, *(path for path in package.rglob("*") if path.is_dir() and path.name != "__pycache__")):
        files = [file for file in folder.iterdir() if file.is_file() and file.name != "__init__.py"]
        if len(files) > MOST_FILES:
            found.append(f"{folder.name}/ has {len(files)} files, more than {MOST_FILES}")
        for file in files:
            if file.suffix == ".py" and (lines := file.read_text().count("\n")) > MOST_LINES:
                found.append(f"{file.relative_to(package)} has {lines} lines, more than {MOST_LINES}")
    return found


def _imported(nodes: Iterator[ast.AST] | list[ast.stmt], inside: tuple[str, ...]) -> Iterator[str]:
    """Dotted names; `from meshwright import errors` is meshwright.errors."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ["meshwright", *inside[: len(inside) - node.level]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{module}.{alias.name}" if _is_package(module, alias.name) else module


def _is_package(module: str, name: str) -> bool:
    """Whether `from module import name` imports a file or folder called `name`."""
    if module == "meshwright":
        return True
    place = PACKAGE.parent.joinpath(*module.split("."))
    return (place / f"{name}.py").is_file() or (place / name / "__init__.py").is_file()


def _environment(tree: ast.AST) -> Iterator[int]:
    """Lines that read environment variables, by whichever function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in READS_ENVIRONMENT:
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and any(alias.name in READS_ENVIRONMENT for alias in node.names):
            yield node.lineno
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith("/environ"):
            yield node.lineno


def test_imports_flow_down_only() -> None:
    assert problems(PACKAGE) == []


def test_every_room_has_a_level() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms - set(ENTRY_POINTS) == set(LEVELS), "the table lists the rooms that exist, and no others"
    folders = {room: {path.parent.name for path in PACKAGE.glob(f"{room}/*/__init__.py")} for room in rooms}
    assert {room: names for room, names in folders.items() if names} == {room: set(FOLDERS[room]) for room in FOLDERS}


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("data/order.py", "from meshwright.train.session import Session", "data (level 1) imports train (level 4)"),
        ("data/order.py", "from meshwright import train", "data (level 1) imports train (level 4)"),
        ("data/order.py", "from ..train import session", "data (level 1) imports train (level 4)"),
        ("data/order.py", "import meshwright.launch.world", "data (level 1) imports launch (level 1)"),
        ("data/order.py", "def late():\n    from meshwright.job import Job", "data (level 1) imports job (level 1)"),
        ("planner/search.py", "from meshwright.parallel.apply import apply", "predicting and executing"),
        ("train/trainer.py", "from meshwright.simulator.memory.peak import peak", "predicting and executing"),
        ("train/trainer.py", "from meshwright.cli import app", "train (level 4) imports cli (level 8)"),
        ("plan.py", "from meshwright.call import Call", "plan (level 0) imports call (level 0)"),
        ("plan.py", "import torch", "imports torch when it is loaded"),
        ("job.py", "from torch import nn", "imports torch when it is loaded"),
        ("train/run.py", "import os\nhome = os.environ['HOME']", "train/run.py:2 reads the environment"),
        ("cli.py", "from os import getenv", "reads the environment"),
        ("cli.py", "import os\nhome = os.path.expandvars('$HOME')", "cli.py:2 reads the environment"),
        ("data/order.py", "from pathlib import Path\nhome = Path.home()", "data/order.py:2 reads the environment"),
        ("data/order.py", "text = open('/proc/self/environ').read()", "data/order.py:1 reads the environment"),
        ("parallel/tensor/a.py", "from meshwright.parallel.pipeline.b import b", "parallel/pipeline, which lies above"),
        ("parallel/a/b.py", "import ast", "folder 'a' of parallel is not in the table"),
        ("plan.py", "\n" * 401, "plan.py has 401 lines, more than 400"),
        ("utils/text.py", "", "'utils' is not in the design's table"),
        ("data/order.py", "from meshwright.utils import text", "imports 'utils'"),
        ("data/order.py", "import meshwright", "imports an entry point"),
    ],
)
def test_a_breach_is_caught(tmp_path: Path, file: str, line: str, complaint: str) -> None:
    planted = tmp_path / "meshwright" / file
    planted.parent.mkdir(parents=True)
    planted.write_text(line)
    assert complaint in "\n".join(problems(tmp_path / "meshwright"))


def test_a_circle_of_imports_is_caught(tmp_path: Path) -> None:
    package = tmp_path / "meshwright"
    (package / "data").mkdir(parents=True)
    for name, imported in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")):
        (package / "data" / f"{name}.py").write_text(f"def late():\n    from meshwright.data.{imported} import x")
    circle = [line for line in problems(package) if "circle" in line]
    assert circle == [f"meshwright.data.{name} is in a circle of imports" for name in "abc"]


def test_a_folder_of_too_many_files_is_caught(tmp_path: Path) -> None:
    folder = tmp_path / "meshwright" / "data"
    folder.mkdir(parents=True)
    for number in range(16):
        (folder / f"part{number}.py").write_text("")
    assert "data/ has 16 files, more than 15" in problems(tmp_path / "meshwright")


def test_what_the_table_allows_is_not_caught(tmp_path: Path) -> None:
    package = tmp_path / "meshwright"
    (package / "launch").mkdir(parents=True)
    (package / "launch" / "environment.py").write_text("import os\nrank = os.environ['RANK']")
    (package / "call.py").write_text("from meshwright.errors import InputError\ndef late():\n    import torch")
    (package / "cli.py").write_text("from meshwright.planner.search import best\nfrom meshwright.train.run import t")
    (package / "__init__.py").write_text("from meshwright.train.session import Session")
    assert problems(package) == []
