"""Callables are named by import path, also those in a user's own file; a mistake in one is reported in one line."""

import logging
import os
import signal
import site
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError, UserCodeError
from meshwright.user import code as user_code
from meshwright.user import torchvision_import
from meshwright.user.call import Call, bind, build, load
from meshwright.user.code import exits_become_errors


@pytest.fixture(autouse=True)
def _import_state() -> Iterator[None]:
    """Removes the user files that a test imported, which stay imported during a run."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith(("meshwright_user_", "users_")):
            del sys.modules[name]


def pair(first: Any, second: Any = 2, **others: Any) -> tuple[Any, Any, dict[str, Any]]:
    return first, second, others


def plain(size: int, root: str = "own default", seed: int = 7) -> tuple[int, str, int]:
    return size, root, seed


class Scale:
    def __init__(self, by: float = 1.0) -> None:
        self.by = by

    def __call__(self, value: float) -> float:
        return self.by * value


class Plain:
    pass


def call(path: str, **arguments: Any) -> Call:
    return Call.model_validate({"call": path, **arguments})


@pytest.mark.parametrize("path", ["collections:OrderedDict", "collections.OrderedDict"])
def test_modules_are_named_with_a_colon_or_a_dot(path: str) -> None:
    from collections import OrderedDict

    assert load(path) is OrderedDict


def test_attributes_of_attributes_can_be_named() -> None:
    assert load("pathlib:Path.home") == Path.home


def test_a_file_is_imported_once_and_finds_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "users_neighbour.py").write_text("value = 3")
    (tmp_path / "users_model.py").write_text("from users_neighbour import value\ndef build(): return value")
    path = f"{tmp_path}/users_model.py:build"
    assert build(call(path), role="model") == 3
    assert load(path) is load(path)


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "users_model.py").write_text(f"value = {number}")
    assert [load(f"{tmp_path}/{number}/users_model.py:value") for number in (1, 2)] == [1, 2]


def test_modules_in_the_working_folder_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_here.py").write_text("value = 5")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert load("users_here:value") == 5


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_package.module:name", "there is no module 'no_such_package'"),
        ("collections.nothing:name", "there is no module 'collections.nothing'"),
        ("collections:OrderdDict", "collections has no 'OrderdDict': did you mean 'OrderedDict'?"),
        ("collections:OrderedDict.popp", "OrderedDict has no 'popp': did you mean 'pop'?"),
        ("nowhere/model.py:build", "there is no file nowhere/model.py"),
        ("Net", "is not an import path"),
        (":Net", "is not an import path"),
        (".models:Net", "is not an import path"),
    ],
)
def test_a_path_that_names_nothing_is_reported_in_one_line(path: str, message: str) -> None:
    with pytest.raises(InputError) as refusal:
        load(path)
    assert message in str(refusal.value)
    assert f"'{path}'" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def build(:\n  pass", "users_broken.py, line 1: "),
        ("import no_such_package", "users_broken.py needs 'no_such_package', which is not installed"),
    ],
)
def test_a_user_file_that_cannot_be_imported_is_reported_in_one_line(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "users_broken.py").write_text(source)
    for _ in range(2):  # the second time as well: the incomplete module is not kept
        with pytest.raises(InputError) as refusal:
            load(f"{tmp_path}/users_broken.py:build")
        assert message in str(refusal.value)
        assert "\n" not in str(refusal.value)


def test_a_module_that_fails_while_it_is_imported_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_neighbour.py").write_text("x = 1\nraise NameError('no such\\nname')\n")
    monkeypatch.chdir(tmp_path)
    for path in ("failing_neighbour.py:X", "failing_neighbour:X"):
        with pytest.raises(
            UserCodeError, match=r"failed: NameError: no such name \(.*failing_neighbour\.py, line 2\)$"
        ):
            load(path)


def test_a_module_with_a_missing_import_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_needy.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="importing users_needy needs 'no_such_package', which is not installed"):
        load("users_needy:build")


def test_arguments_may_be_calls_themselves_at_any_depth() -> None:
    inner = {"call": "tests.user.test_call:pair", "first": {"call": "fractions:Fraction", "numerator": 3}}
    result = build(call("tests.user.test_call:pair", first=[inner, 1], second={"plain": inner}), role="model")
    assert result[0] == [(3, 2, {}), 1]
    assert result[1] == {"plain": (3, 2, {})}


def test_the_result_of_an_inner_call_is_passed_unchanged() -> None:
    inner = {"call": "collections:OrderedDict"}
    assert type(build(call("tests.user.test_call:pair", first=inner), role="model")[0]).__name__ == "OrderedDict"


def test_a_mistake_in_an_inner_call_is_reported() -> None:
    with pytest.raises(InputError, match=r"model: tests\.user\.test_call:plain takes no 'sise': did you mean 'size'\?"):
        build(call("tests.user.test_call:pair", first={"call": "tests.user.test_call:plain", "sise": 3}), role="model")


def test_offered_arguments_are_passed_only_to_callables_that_name_them() -> None:
    offered = {"seed": 5, "synthetic": True}
    assert build(call("tests.user.test_call:plain", size=1), offered=offered, role="data") == (1, "own default", 5)
    assert build(call("tests.user.test_call:plain", size=1, seed=9), offered=offered, role="data")[2] == 9
    assert build(call("tests.user.test_call:pair", first=1), offered=offered, role="data") == (1, 2, {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 1, "roots": "x"}, "data: tests.user.test_call:plain takes no 'roots': did you mean 'root'?"),
        ({}, "data: tests.user.test_call:plain: missing a required argument: 'size'"),
    ],
)
def test_arguments_are_checked_before_the_call(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refusal:
        build(call("tests.user.test_call:plain", **arguments), role="data")
    assert str(refusal.value) == message


def test_binding_constructs_classes_and_fixes_arguments_of_functions() -> None:
    assert bind(call("tests.user.test_call:Scale", by=3), "metric")(2) == 6
    assert bind(call("tests.user.test_call:pair", second=5), "metric")(1) == (1, 5, {})
    assert bind(call("tests.user.test_call:pair"), "metric") is pair


@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        ("tests.user.test_call:plain", {"sizes": 1}, "loss: tests.user.test_call:plain takes no 'sizes'"),
        (
            "tests.user.test_call:Scale",
            {"bye": 1},
            "loss: tests.user.test_call:Scale takes no 'bye': did you mean 'by'?",
        ),
        ("tests.user.test_call:Plain", {}, "loss: tests.user.test_call:Plain makes a Plain, which cannot be called"),
        ("math:pi", {}, "loss: math:pi is a float, which cannot be called"),
    ],
)
def test_what_cannot_be_bound_is_reported(path: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refusal:
        bind(call(path, **arguments), "loss")
    assert message in str(refusal.value)


ENDINGS = {
    "sys.exit(0)": "SystemExit: exit code 0",
    "exit()": "SystemExit: exit code 0",
    "raise SystemExit('done')": "SystemExit: exit code done",
    "os._exit(0)": "SystemExit: exit code 0",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "raise StopIteration": "StopIteration",
    "raise GeneratorExit": "GeneratorExit",
    "raise type('Ending', (BaseException,), {})('over')": "Ending: over",
}


@pytest.mark.parametrize("statement", ENDINGS)
@pytest.mark.parametrize("path", ["users_ending.py:build", "users_ending:build"])
def test_a_file_that_ends_the_program_is_an_error_with_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str, path: str
) -> None:
    (tmp_path / "users_ending.py").write_text(f"import os, sys\n\n{statement}\n")
    monkeypatch.chdir(tmp_path)
    with exits_become_errors(), pytest.raises(UserCodeError) as failure:
        load(path)
    assert failure.value.exit_code == 1
    assert f"failed: {ENDINGS[statement]} (" in str(failure.value)
    assert str(failure.value).endswith("users_ending.py, line 3)")


def end(statement: str) -> None:
    exec(compile(statement, __file__, "exec"), {"os": os, "sys": sys, "exit": sys.exit})


class Ending:
    def __init__(self, statement: str) -> None:
        end(statement)

    def __call__(self) -> None: ...


@pytest.mark.parametrize("statement", [*ENDINGS, "raise EOFError"])
def test_a_constructor_that_ends_the_program_is_an_error_with_file_and_line(statement: str) -> None:
    with (
        exits_become_errors(),
        pytest.raises(UserCodeError, match=r"^model: .*:end failed: .*test_call\.py, line"),
    ):
        build(call("tests.user.test_call:end", statement=statement), role="model")
    with exits_become_errors(), pytest.raises(UserCodeError, match=r"^loss: .*:Ending failed: .*test_call\.py, line"):
        bind(call("tests.user.test_call:Ending", statement=statement), "loss")


def test_other_exceptions_of_a_constructor_stay_as_they_are() -> None:
    with pytest.raises(ValueError, match="odd"):
        build(call("tests.user.test_call:end", statement="raise ValueError('odd')"), role="model")


def test_ctrl_c_during_an_import_stays_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "users_long.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process ignores SIGINT
    try:
        with exits_become_errors(), pytest.raises(KeyboardInterrupt):
            load(f"{tmp_path}/users_long.py:build")
    finally:
        signal.signal(signal.SIGINT, previous)


def test_processes_that_are_forked_while_exits_are_errors_can_end(tmp_path: Path) -> None:
    with exits_become_errors():
        child = os.fork()
        if child == 0:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert os._exit.__module__ == "posix"


UNTIL_ANNOUNCED = """
import threading
for thread in threading.enumerate():
    if isinstance(thread, threading.Timer):
        thread.join()
"""


def wait_until_announced(size: int = 3) -> int:
    exec(UNTIL_ANNOUNCED, {})
    return size


def test_a_long_import_and_a_long_constructor_are_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(user_code, "SLOW_S", 0.05)
    monkeypatch.chdir(tmp_path)
    for name in ("users_slow", "users_slower"):
        (tmp_path / f"{name}.py").write_text(f"{UNTIL_ANNOUNCED}\nvalue = 4\n")
    assert load("users_slow.py:value") == 4
    assert load("users_slower:value") == 4
    assert build(call("tests.user.test_call:wait_until_announced"), role="data.train") == 3
    assert capsys.readouterr() == (
        "",
        "importing users_slow.py since 0.05 s\n"
        "importing users_slower since 0.05 s\n"
        "building data.train (tests.user.test_call:wait_until_announced) since 0.05 s\n",
    )
    load("users_slow.py:value")
    assert capsys.readouterr().err == "", "a second load imports nothing"


# ---- a torchvision that was built for another version of torch


@pytest.fixture
def old_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package torchvision whose first import fails as the real one does if it cannot load its operators."""
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(torchvision_import, "_operators", ["those of the real torchvision"])
    package = tmp_path / "old" / "torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from torchvision import operators\n")
    (package / "operators.py").write_text(
        "from pathlib import Path\n"
        "tried = Path(__file__).with_name('tried')\n"
        "if not tried.exists():\n"
        "    tried.touch()\n"
        "    raise RuntimeError('operator torchvision::nms does not exist')\n"
    )
    monkeypatch.syspath_prepend(package.parent)
    return package


def test_a_users_file_may_import_what_imports_torchvision(tmp_path: Path, old_torchvision: Path) -> None:
    (tmp_path / "users_library.py").write_text("import torchvision.operators\n")
    (tmp_path / "users_model.py").write_text("import users_library\n\nsize = 3\n")
    try:
        assert load(f"{tmp_path}/users_model.py:size") == 3
        assert sys.modules["torchvision"].__file__ == str(old_torchvision / "__init__.py")
        assert (old_torchvision / "tried").exists()
    finally:
        for name in ("torchvision", "torchvision.operators"):
            sys.modules.pop(name, None)


def test_other_errors_of_torchvision_are_reported(tmp_path: Path, old_torchvision: Path) -> None:
    (old_torchvision / "operators.py").write_text("raise RuntimeError('another reason')")
    (tmp_path / "users_model.py").write_text("import torchvision\n")
    with pytest.raises(UserCodeError, match="importing it failed: RuntimeError: another reason"):
        load(f"{tmp_path}/users_model.py:size")


@pytest.mark.soak
def test_a_users_file_may_import_transformers_in_a_new_process(tmp_path: Path) -> None:
    (tmp_path / "users_model.py").write_text("from transformers import ViTForImageClassification as model\n")
    code = f"from meshwright.user.call import load; print(load('{tmp_path}/users_model.py:model').__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout == "ViTForImageClassification\n", done.stderr


# ---- whose code a file is


def test_packages_that_a_path_file_adds_are_no_code_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed, project = tmp_path / "other" / "site-packages", tmp_path / "project"
    (installed / "library-1.0.dist-info").mkdir(parents=True)
    project.mkdir()
    (tmp_path / "paths.pth").write_text(f"{installed}\n{project}\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    site.addsitedir(str(tmp_path))
    assert not user_code.is_user_file(str(installed / "library" / "code.py"))
    assert user_code.is_user_file(str(project / "model.py")), "a project that is installed in editable mode"


def test_a_deprecation_of_a_librarys_enumeration_is_not_printed(caplog: pytest.LogCaptureFixture) -> None:
    load("json:loads")
    log = logging.getLogger("torch.utils._pytree")
    log.warning("%s is an Enum subclass and is now natively supported by torch.compile", "KernelPreference")
    log.warning("another warning")
    assert [record.getMessage() for record in caplog.records] == ["another warning"]
