"""Checks what only some files of the package may do: know other libraries' training (`compat/`), read the environment
or pickles, import torch when they are loaded."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.test_layers import ENTRY_POINTS, PACKAGE, READ_NODES, imported

# Files, and folders with a slash at the end.
WITHOUT_TORCH = (
    *(
        "plan.py",
        "plan_fields/",
        "plan_rules/",
        "job.py",
        "errors.py",
        "doors.py",
        "user/",
    ),
    *("numbers/", "files/", "compat/__init__.py", "compat/lightning_job.py", "compat/deepspeed_config/"),
)
# Only these files read the environment. `cache` reads XDG_CACHE_HOME and the home folder, `trust` the user's key
# (MESHWRIGHT_KEY, MESHWRIGHT_KEY_FILE and XDG_STATE_HOME), `user_path` the home folders that `~` stands for. In
# `processes/`, `environment` reads which rank this is, `store_place` the names of variables of parent processes,
# `interface` the interfaces of Gloo and NCCL, `machines` and `run_token` what the launchers of several machines agree
# on; the others pass all variables on to processes that they start.
MAY_READ_ENVIRONMENT = (
    *("files/cache.py", "files/trust.py", "files/user_path.py"),
    *("processes/environment.py", "processes/torch_private.py", "processes/launchers/store_place.py"),
    *("processes/local/fork_server.py", "processes/local/run_in_ranks.py", "processes/local/replacing_agent.py"),
    # the command of an audit passes all on; its recorder finds its folder there, and the rank before torch knows it
    *("audit/run_command.py", "audit/recorder/settings.py"),
    "audit/recorder/start_up/sitecustomize.py",
    *("processes/network/interface.py", "processes/token/machines.py", "processes/token/run_token.py"),
)
# Files of `compat/` that read their library's variables, by `processes/environment.py`, and how these variables begin.
VARIABLES_OF_DOORS = {
    "compat/accelerate/settings.py": ("ACCELERATE_",),
    "compat/horovod/variables.py": (
        *("HOROVOD_", "MESHWRIGHT_HOROVOD_"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),  # where the ranks' store is, if they restarted
    ),
}
# Files that pass all variables on to a process that they start, by `processes/environment.py`.
PASS_VARIABLES_ON = ("compat/horovod/launcher/command.py", "compat/horovod/launcher/worker_process.py")
READS_ENVIRONMENT = (
    *("environ", "environb", "getenv", "getenvb", "putenv"),
    *("expandvars", "expanduser", "home", "getuser"),  # of os.path, pathlib and getpass
)
# What reads pickles: reading one can execute code. Values are exchanged and stored as plain_values.py writes them.
PICKLE_MODULES = ("pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")
PICKLE_READERS = (
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "FileSystemReader", "DefaultLoadPlanner"),
)
MAY_READ_PICKLES = {
    "proof/record/request_file.py": "the user's own model, for ranks of the same user, in a file that is private",
    "files/safe_pickle.py": "an unpickler that calls only what it is told to",
    "compat/horovod/object_pickle.py": "objects of the user's script, from ranks that the user has started",
    "processes/nodes/rendezvous_state.py": "the state of torch's rendezvous, pickled by torch in the same process",
    "processes/local/function_pickle.py": "the user's own function and its value, over a private pair of sockets",
}
# Libraries that `compat/` is for. Nothing but `cli/` and `compat/` imports these or `compat/`, or names a module of
# theirs in a string. For each exception, the libraries that it may name, and why that is right.
LIBRARIES = (
    *("lightning", "pytorch_lightning", "lightning_fabric"),
    *("accelerate", "transformers", "deepspeed", "horovod", "ray"),
)
KNOW_DOORS = ("cli", "compat")
MAY_NAME_LIBRARIES = {
    "audit/recorder/imports.py": (("deepspeed",), "records training under it, in processes without this package"),
    "export/configurations/write.py": (("accelerate", "deepspeed"), "formats of files that it writes"),
    "export/huggingface.py": (("transformers",), "writes a user's model of transformers as the library reads it"),
    "parallel/weights/transformers_files.py": (("transformers",), "its rules for the names of pretrained weights"),
    "plan.py": (("deepspeed",), "the public Plan.from_deepspeed, which calls what compat/ has registered"),
    "profile/fake.py": (("transformers",), "a patch of the library while a user's model of it is traced"),
    "zoo/huggingface.py": (("transformers",), "builds models of the library that the user names, hf:…"),
    "plan_rules/doors.py": (("transformers",), "the table of rules says for whom a rule is"),
}


def edge_problems(package: Path) -> list[str]:
    """Returns everything that a file of a package called meshwright does and may not."""
    problems: list[str] = []
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package).as_posix()
        name, module_path = f"{package.name}/{path}", file.relative_to(package).with_suffix("").parts
        tree = ast.parse(file.read_text())
        nodes = [node for node in ast.walk(tree) if isinstance(node, READ_NODES)]
        if path not in MAY_READ_ENVIRONMENT:
            problems += [f"{name}:{line} reads the environment" for line in _environment_reads(nodes)]
            problems += [f"{name}:{line} reads variables of others" for line in _reads_of_others(nodes, path)]
        if path not in MAY_READ_PICKLES:
            problems += [f"{name}:{line} reads pickles" for line in _pickle_reads(nodes)]
        if module_path[0] not in (*KNOW_DOORS, *ENTRY_POINTS):
            problems += [f"{name}:{line} names {word}" for line, word in _names_of_doors(nodes, path)]
        if any(path == place or (place.endswith("/") and path.startswith(place)) for place in WITHOUT_TORCH):
            imports_torch = any(module.split(".")[0] == "torch" for module in imported(tree.body, module_path))
            problems += [f"{name} imports torch when it is loaded"] * imports_torch
    return problems


def _environment_reads(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Yields the numbers of lines that read environment variables, by whichever function."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in READS_ENVIRONMENT:
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and any(alias.name in READS_ENVIRONMENT for alias in node.names):
            yield node.lineno
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith("/environ"):
            yield node.lineno


def _reads_of_others(nodes: Iterable[ast.AST], path: str) -> Iterator[int]:
    """Yields the numbers of lines that read variables of a library by `processes/environment.py`, unless they are those
    of this file's own library, and of lines that take all variables."""
    may_call = {"variables_of": path in VARIABLES_OF_DOORS, "variables_with": path in PASS_VARIABLES_ON}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and not all(may_call.get(alias.name, True) for alias in node.names):
            yield node.lineno
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            beginnings = {getattr(argument, "value", None) for argument in node.args}
            is_own = called != "variables_of" or beginnings <= {*VARIABLES_OF_DOORS.get(path, ())}
            if not (is_own and may_call.get(called, True)):
                yield node.lineno


def _names_of_doors(nodes: Iterable[ast.AST], path: str) -> Iterator[tuple[int, str]]:
    """Yields lines that import a library of `LIBRARIES`, or `compat/`, or that name a module of theirs in a string, and
    which one."""
    allowed = MAY_NAME_LIBRARIES.get(path, ((), ""))[0]
    for node in nodes:
        if not isinstance(node, ast.Import | ast.ImportFrom | ast.Constant):
            continue
        modules = list(imported([node], tuple(path.split("/"))))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            modules = re.findall(r"^[\w.]+(?=$|:)|meshwright\.compat(?!\w)", node.value)
        for module in modules:
            library = "meshwright.compat" if f"{module}.".startswith("meshwright.compat.") else module.split(".")[0]
            if library in (*LIBRARIES, "meshwright.compat") and library not in allowed:
                yield node.lineno, library


def _pickle_reads(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Yields the numbers of lines that import a module for pickles, or call what reads them."""
    for node in nodes:
        if isinstance(node, ast.Import) and any(alias.name.split(".")[0] in PICKLE_MODULES for alias in node.names):
            yield node.lineno
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            module = (node.module or "").split(".")[0]
            if module in PICKLE_MODULES or names & {*PICKLE_READERS} or (node.module == "torch" and "load" in names):
                yield node.lineno
        if isinstance(node, ast.Attribute) and node.attr in PICKLE_READERS:
            yield node.lineno
        if isinstance(node, ast.Call) and _loads_pickles(node):
            yield node.lineno


def _loads_pickles(call: ast.Call) -> bool:
    """Returns whether this is a call of `torch.load`, which files/pt_file.py replaces, or one of `np.load` that does
    not refuse pickles."""
    options = {option.arg: getattr(option.value, "value", None) for option in call.keywords}
    if options.get("allow_pickle", False) is not False or options.get("weights_only", True) is not True:
        return True
    return ast.unparse(call.func) == "torch.load"


def test_only_those_who_may_know_libraries_read_variables_or_pickles() -> None:
    assert edge_problems(PACKAGE) == []


def test_every_file_that_may_read_pickles_does() -> None:
    assert all(list(_pickle_reads(_nodes(file))) for file in MAY_READ_PICKLES)


def test_every_file_that_may_read_the_environment_does() -> None:
    assert all(list(_environment_reads(_nodes(file))) for file in MAY_READ_ENVIRONMENT)


def test_every_door_reads_the_variables_that_it_may() -> None:
    for file, beginnings in VARIABLES_OF_DOORS.items():
        assert list(_reads_of_others(_nodes(file), "")), file
        assert {*beginnings} <= {getattr(node, "value", None) for node in _nodes(file)}
    assert all(list(_reads_of_others(_nodes(file), "")) for file in PASS_VARIABLES_ON)


def test_every_file_that_may_name_libraries_does() -> None:
    for file, (words, _) in MAY_NAME_LIBRARIES.items():
        assert {word for _, word in _names_of_doors(_nodes(file), "")} == {*words}, file


def _nodes(file: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse((PACKAGE / file).read_text())))


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("plan.py", "import torch", "imports torch when it is loaded"),
        ("job.py", "from torch import nn", "imports torch when it is loaded"),
        ("train/run.py", "import os\nhome = os.environ['HOME']", "train/run.py:2 reads the environment"),
        ("cli.py", "from os import getenv", "reads the environment"),
        ("cli.py", "import os\nhome = os.path.expandvars('$HOME')", "cli.py:2 reads the environment"),
        ("data/order.py", "from pathlib import Path\nhome = Path.home()", "data/order.py:2 reads the environment"),
        ("data/order.py", "text = open('/proc/self/environ').read()", "data/order.py:1 reads the environment"),
        ("processes/world.py", "import os\nrank = os.environ['RANK']", "processes/world.py:2 reads the environment"),
        ("compat/ray/run.py", "import os\nrank = os.environ['RANK']", "compat/ray/run.py:2 reads the environment"),
        ("train/run.py", "variables_of('HOROVOD_')", "train/run.py:1 reads variables of others"),
        ("compat/accelerate/settings.py", "a.variables_of('HOROVOD_')", "settings.py:1 reads variables of others"),
        ("compat/accelerate/settings.py", "variables_of(name)", "settings.py:1 reads variables of others"),
        ("compat/ray/run.py", "variables_with()", "run.py:1 reads variables of others"),
        ("train/run.py", "import accelerate.utils", "train/run.py:1 names accelerate"),
        ("export/late.py", "def late():\n    from lightning.pytorch import Trainer", "late.py:2 names lightning"),
        ("report/run/page.py", "load('transformers:Trainer')", "page.py:1 names transformers"),
        ("proof/late.py", "import_module('meshwright.compat.ray')", "late.py:1 names meshwright.compat"),
        ("processes/late.py", "raise Error(f'start python -m meshwright.compat.horovod')", "names meshwright.compat"),
        ("plan.py", "from meshwright.compat import check", "plan.py:1 names meshwright.compat"),
        ("zoo/huggingface.py", "import deepspeed", "huggingface.py:1 names deepspeed"),
        ("compat/deepspeed_config/keys.py", "import torch", "imports torch when it is loaded"),
        ("train/run.py", "import json\nimport pickle as p", "train/run.py:2 reads pickles"),
        ("train/run.py", "from marshal import loads", "reads pickles"),
        ("train/run.py", "def late():\n    import cloudpickle", "train/run.py:2 reads pickles"),
        ("checkpoint/load.py", "import torch\ntorch.load(file)", "checkpoint/load.py:2 reads pickles"),
        ("checkpoint/load.py", "import torch\ntorch.load(file, weights_only=True)", "load.py:2 reads pickles"),
        ("checkpoint/load.py", "from torch import load", "load.py:1 reads pickles"),
        ("data/order.py", "import numpy as np\nnp.load(file, allow_pickle=True)", "order.py:2 reads pickles"),
        ("train/run.py", "import torch.distributed as dist\ndist.gather_object(a)", "run.py:2 reads pickles"),
        ("train/run.py", "from torch.distributed import broadcast_object_list", "run.py:1 reads pickles"),
        ("compat/ray/run.py", "from a import variables_with as b", "run.py:1 reads variables of others"),
    ],
)
def test_a_breach_is_caught(tmp_path: Path, file: str, line: str, complaint: str) -> None:
    wrong_file = tmp_path / "meshwright" / file
    wrong_file.parent.mkdir(parents=True)
    wrong_file.write_text(line)
    assert complaint in "\n".join(edge_problems(tmp_path / "meshwright"))


def test_what_is_allowed_is_accepted(tmp_path: Path) -> None:
    package = tmp_path / "meshwright"
    for folder in ("processes", "compat/accelerate", "train"):
        (package / folder).mkdir(parents=True)
    (package / "processes" / "environment.py").write_text("import os\nrank = os.environ['RANK']")
    (package / "compat" / "accelerate" / "settings.py").write_text("import accelerate\na.variables_of('ACCELERATE_')")
    (package / "train" / "run.py").write_text("import array\nraise InputError('ray is no word: a transformers model')")
    (package / "doors.py").write_text("def late():\n    import torch")
    (package / "dtypes.py").write_text("import numpy\nnumpy.load(a)")
    assert edge_problems(package) == []
