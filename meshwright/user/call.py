"""`Call`: a callable that a job names by import path, with keyword arguments. A user's own `my_model.py:build` works as
well as `torchvision.models.vgg16`. `load` imports it, `build` calls it, `bind` prepares it for later calls."""

import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

from pydantic import BaseModel, ConfigDict

from meshwright import doors
from meshwright.errors import InputError, did_you_mean
from meshwright.numbers.limits import is_number
from meshwright.user.code import raise_user_code_error, running_user_code
from meshwright.user.torchvision_import import mend_torchvision

_USER_MODULE = "meshwright_user_"  # begins the names of modules that are imported from a file


class Call(BaseModel):
    """A callable and its keyword arguments, written in a job as `{call: package.module:name, key: value, ...}`. Every
    key except `call` is a keyword argument.

    If the value of an argument is itself a mapping with `call`, the result of that call is passed.
    """

    model_config = ConfigDict(frozen=True, extra="allow")
    call: str

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments as the job writes them: nested calls are not made."""
        return dict(self.model_extra or {})


def load(path: str) -> Any:
    """The object that an import path names: `package.module:name`, `package.module.name` or `folder/file.py:name`."""
    if path in doors.names("call"):
        return doors.function("call", path)
    if ".py:" in path:
        file, _, name = path.rpartition(":")
        return _attribute(_import_file(Path(file), path), name, path)
    if ":" in path:
        module, _, name = path.partition(":")
        return _attribute(_import_module(module, path), name, path)
    module, _, name = path.rpartition(".")
    return _attribute(_import_module(module, path), name, path)


def build(call: Call, *positional: Any, offered: Mapping[str, Any] | None = None, role: str) -> Any:
    """Calls the callable that `call` names, and returns its result. Each `offered` keyword argument is passed if the
    callable has a parameter of that name.

    `role` names the part of the job in error messages.
    """
    target = load(call.call)
    arguments = _build_nested(call.arguments, role)
    for name, value in (offered or {}).items():
        if name not in arguments and name in _parameter_names(target):
            arguments[name] = value
    check_arguments(target, positional, arguments, f"{role}: {call.call}")
    return _run_constructor(target, positional, arguments, role, call.call)


def bind(call: Call, role: str) -> Callable[..., Any]:
    """Returns a callable for later use. If `call` names a class, that is an instance of the class, which is constructed
    now. If `call` names a function, it is this function with the keyword arguments filled in."""
    target = load(call.call)
    arguments = _build_nested(call.arguments, role)
    if inspect.isclass(target):
        check_arguments(target, (), arguments, f"{role}: {call.call}")
        instance = _run_constructor(target, (), arguments, role, call.call)
        if not callable(instance):
            raise InputError(f"{role}: {call.call} makes a {type(instance).__name__}, which cannot be called")
        return instance
    if not callable(target):
        raise InputError(f"{role}: {call.call} is a {type(target).__name__}, which cannot be called")
    unknown = [name for name in arguments if not _accepts(target, name)]
    if unknown:
        near = did_you_mean(unknown[0], _parameter_names(target))
        raise InputError(f"{role}: {call.call} takes no '{unknown[0]}'{near}")
    return partial(target, **arguments) if arguments else target


def takes(call: Call, name: str) -> bool:
    """Whether what is called has a parameter of this name."""
    return name in _parameter_names(load(call.call))


def check_arguments(
    target: Callable[..., Any], positional: tuple[Any, ...], arguments: Mapping[str, Any], role: str
) -> None:
    """Raises an `InputError` when the callable does not accept these arguments, without calling it."""
    if not callable(target):
        raise InputError(f"{role} is a {type(target).__name__}, which cannot be called")
    signature = _signature(target)
    if signature is None:
        return
    unknown = [name for name in arguments if not _accepts(target, name)]
    if unknown:
        raise InputError(f"{role} takes no '{unknown[0]}'{did_you_mean(unknown[0], _parameter_names(target))}")
    try:
        signature.bind(*positional, **arguments)
    except TypeError as error:
        raise InputError(f"{role}: {error}") from None


def _check_numbers(target: Callable[..., Any], arguments: Mapping[str, Any], role: str, error: TypeError) -> None:
    """Raises an `InputError` if a call failed with a text in the place of a number, as YAML reads `1e-3`."""
    signature = _signature(target)
    for name, value in arguments.items():
        parameter = signature.parameters.get(name) if signature else None
        if isinstance(value, str) and parameter is not None and is_number(parameter.default):
            raise InputError(
                f"{role} takes a number as {name}, by default {parameter.default}, and this is the text {value!r:.50}"
            ) from error


def _run_constructor(
    target: Callable[..., Any], positional: tuple[Any, ...], arguments: Mapping[str, Any], role: str, path: str
) -> Any:
    """Calls the target and returns its result. Exceptions that say by their class that something has ended become a
    `UserCodeError`; callers handle the others."""
    with running_user_code(f"building {role} ({path})"):
        try:
            return target(*positional, **arguments)
        except BaseException as error:
            if isinstance(error, TypeError):
                _check_numbers(target, arguments, f"{role}: {path}", error)
            if isinstance(error, Exception) and not isinstance(error, (StopIteration, EOFError)):
                raise
            raise_user_code_error(error, f"{role}: {path} failed")


def _build_nested(value: Any, role: str) -> Any:
    """A copy of an argument in which every mapping with `call`, at any depth, is replaced by the call's result."""
    if isinstance(value, Mapping):
        if isinstance(value.get("call"), str):
            return build(Call.model_validate(value), role=role)
        return {key: _build_nested(item, role) for key, item in value.items()}
    if isinstance(value, list):
        return [_build_nested(item, role) for item in value]
    return value


def _signature(target: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):  # some built-ins have no signature
        return None


def _parameter_names(target: Callable[..., Any]) -> list[str]:
    signature = _signature(target)
    return [name for name in signature.parameters if name != "self"] if signature else []


def _accepts(target: Callable[..., Any], name: str) -> bool:
    signature = _signature(target)
    if signature is None:
        return True
    kinds = {p.kind for p in signature.parameters.values()}
    return name in signature.parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _prepare_imports() -> None:
    """Prepares for what imported libraries do: for torchvision that was built for another torch, and for torchao, which
    transformers imports and whose enumerations torch warns about in several lines that no user can change."""
    mend_torchvision()
    logging.getLogger("torch.utils._pytree").addFilter(_is_no_enum_warning)  # adds it once


def _is_no_enum_warning(record: logging.LogRecord) -> bool:
    return "is an Enum subclass" not in str(record.msg)


def _import_module(module: str, path: str) -> Any:
    if not module or module.startswith("."):
        raise InputError(f"'{path}' is not an import path: write 'package.module:name' or 'file.py:name'")
    # Users keep their modules in the working folder, which console scripts do not have on the path.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    _prepare_imports()
    try:
        with nullcontext() if module in sys.modules else running_user_code(f"importing {module}"):
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(error.name + ".")):
            raise InputError(f"'{path}': there is no module '{error.name}'") from None
        raise InputError(f"'{path}': importing {module} needs '{error.name}', which is not installed") from None
    except SyntaxError as error:
        raise InputError(f"'{path}': {error.filename}, line {error.lineno}: {error.msg}") from None
    except BaseException as error:
        raise_user_code_error(error, f"'{path}': importing {module} failed")


def _import_file(file: Path, path: str) -> Any:
    if not file.is_file():
        raise InputError(f"'{path}': there is no file {file}")
    name = f"{_USER_MODULE}{file.stem}_{crc32(str(file.resolve()).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    if str(file.resolve().parent) not in sys.path:  # so that the file can import modules from its folder
        sys.path.insert(0, str(file.resolve().parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _prepare_imports()
    try:
        with running_user_code(f"importing {file.name}"):
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]  # otherwise the next import would return the incomplete module
        if isinstance(error, SyntaxError):
            raise InputError(f"'{path}': {error.filename}, line {error.lineno}: {error.msg}") from None
        if isinstance(error, ModuleNotFoundError):
            raise InputError(f"'{path}': {file} needs '{error.name}', which is not installed") from None
        raise_user_code_error(error, f"'{path}': importing it failed")
    return module


def _attribute(module: Any, name: str, path: str) -> Any:
    """Returns the attribute of a module with this name, which may be dotted (`Path.home`)."""
    value = module
    for part in name.split("."):
        if not hasattr(value, part):
            where = getattr(value, "__name__", str(value))
            if value is module and where.startswith(_USER_MODULE):
                where = Path(module.__file__).name
            raise InputError(f"'{path}': {where} has no '{part}'{did_you_mean(part, _public_names(value))}")
        value = getattr(value, part)
    return value


def _public_names(module: Any) -> list[str]:
    return [name for name in dir(module) if not name.startswith("_")]
