"""`Call`: something callable, named by import path with keyword arguments, so that a user's own
`my_model.py:build` works as well as `torchvision.models.vgg16`."""

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

from pydantic import BaseModel, ConfigDict, field_validator

from meshwright.errors import InputError, MeshwrightError, did_you_mean

_MOVED = {  # modules that job files written for earlier versions name
    "text": ("decoder", "decoder_sizes", "encoder", "masked", "skip_gram", "token_file", "tokens", "word_contexts"),
    "images": ("image_folder", "voc"),
}
_NEW_PATHS = {
    f"meshwright.workloads.{module}": f"meshwright.workloads.{room}.{module}"
    for room, modules in _MOVED.items()
    for module in modules
}


class Call(BaseModel):
    """`{call: package.module:name, key: value, ...}`; every other key is a keyword argument.

    An argument that is itself a mapping with `call` is built first and passed as the result.
    """

    model_config = ConfigDict(frozen=True, extra="allow")
    call: str

    @field_validator("call")
    @classmethod
    def _by_new_path(cls, path: str) -> str:
        """Modules that have moved are known by their earlier paths too, so that old job files and runs stay valid."""
        module, colon, name = path.partition(":")
        return f"{_NEW_PATHS.get(module, module)}{colon}{name}"

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


def load(path: str) -> Any:
    """The object an import path names: `package.module:name`, `package.module.name` or `folder/file.py:name`."""
    if ".py:" in path:
        file, _, name = path.rpartition(":")
        return _attribute(_import_file(Path(file), path), name, path)
    if ":" in path:
        module, _, name = path.partition(":")
        return _attribute(_import_module(module, path), name, path)
    module, _, name = path.rpartition(".")
    return _attribute(_import_module(module, path), name, path)


def build(call: Call, *positional: Any, offered: Mapping[str, Any] | None = None, role: str) -> Any:
    """Calls what `call` names. `offered` arguments are passed only where the callable knows them by name.

    `role` says in messages which part of the job this is.
    """
    target = load(call.call)
    arguments = _build_nested(call.arguments, role)
    for name, value in (offered or {}).items():
        if name not in arguments and name in _names(target):
            arguments[name] = value
    check_arguments(target, positional, arguments, f"{role}: {call.call}")
    return target(*positional, **arguments)


def bind(call: Call, role: str) -> Callable[..., Any]:
    """A function to be called later: a class is constructed now, a function gets its arguments fixed."""
    target = load(call.call)
    arguments = _build_nested(call.arguments, role)
    if inspect.isclass(target):
        check_arguments(target, (), arguments, f"{role}: {call.call}")
        made = target(**arguments)
        if not callable(made):
            raise InputError(f"{role}: {call.call} makes a {type(made).__name__}, which cannot be called")
        return made
    if not callable(target):
        raise InputError(f"{role}: {call.call} is a {type(target).__name__}, which cannot be called")
    unknown = [name for name in arguments if not _accepts(target, name)]
    if unknown:
        raise InputError(f"{role}: {call.call} takes no '{unknown[0]}'{did_you_mean(unknown[0], _names(target))}")
    return partial(target, **arguments) if arguments else target


def check_arguments(
    target: Callable[..., Any], positional: tuple[Any, ...], arguments: Mapping[str, Any], role: str
) -> None:
    """Refuses arguments that the callable does not take, before it runs."""
    if not callable(target):
        raise InputError(f"{role} is a {type(target).__name__}, which cannot be called")
    signature = _signature(target)
    if signature is None:
        return
    unknown = [name for name in arguments if not _accepts(target, name)]
    if unknown:
        raise InputError(f"{role} takes no '{unknown[0]}'{did_you_mean(unknown[0], _names(target))}")
    try:
        signature.bind(*positional, **arguments)
    except TypeError as error:
        raise InputError(f"{role}: {error}") from None


def complaint(error: Exception) -> str:
    """What code that is not ours said when it failed, and where, in one line."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())} ({where.filename}, line {where.lineno})"


def _build_nested(value: Any, role: str) -> Any:
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
    except (TypeError, ValueError):  # built-ins without one
        return None


def _names(target: Callable[..., Any]) -> list[str]:
    signature = _signature(target)
    return [name for name in signature.parameters if name != "self"] if signature else []


def _accepts(target: Callable[..., Any], name: str) -> bool:
    signature = _signature(target)
    if signature is None:
        return True
    kinds = {p.kind for p in signature.parameters.values()}
    return name in signature.parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _import_module(module: str, path: str) -> Any:
    if not module or module.startswith("."):
        raise InputError(f"'{path}' is not an import path: write 'package.module:name' or 'file.py:name'")
    # Console scripts do not have the working folder on the path, where users keep their modules.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    if module.split(".")[0] in ("torchvision", "timm", "transformers"):  # the latter two import the first
        _define_torchvision_operators()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(error.name + ".")):
            raise InputError(f"'{path}': there is no module '{error.name}'") from None
        raise InputError(f"'{path}': importing {module} needs '{error.name}', which is not installed") from None
    except SyntaxError as error:
        raise InputError(f"'{path}': {error.filename}, line {error.lineno}: {error.msg}") from None
    except MeshwrightError:
        raise
    except Exception as error:
        raise InputError(f"'{path}': importing {module} failed: {complaint(error)}") from error


def _import_file(file: Path, path: str) -> Any:
    if not file.is_file():
        raise InputError(f"'{path}': there is no file {file}")
    name = f"meshwright_user_{file.stem}_{crc32(str(file.resolve()).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    if str(file.resolve().parent) not in sys.path:  # so that the file's own imports of its neighbours work
        sys.path.insert(0, str(file.resolve().parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]  # or the next one to ask would get half a module
        if isinstance(error, SyntaxError):
            raise InputError(f"'{path}': {error.filename}, line {error.lineno}: {error.msg}") from None
        if isinstance(error, ModuleNotFoundError):
            raise InputError(f"'{path}': {file} needs '{error.name}', which is not installed") from None
        if isinstance(error, Exception) and not isinstance(error, MeshwrightError):
            raise InputError(f"'{path}': importing it failed: {complaint(error)}") from error
        raise
    return module


def _attribute(module: Any, name: str, path: str) -> Any:
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            where = getattr(found, "__name__", str(found))
            raise InputError(f"'{path}': {where} has no '{part}'{did_you_mean(part, _public(found))}")
        found = getattr(found, part)
    return found


def _public(module: Any) -> list[str]:
    return [name for name in dir(module) if not name.startswith("_")]


_torchvision_operators: list[Any] = []  # a library lives as long as somebody holds it


def _define_torchvision_operators() -> None:
    """A torchvision built for another torch cannot load its own operators, and then fails to import because
    two of them are missing. Its models and data sets need neither, so their names are enough."""
    if _torchvision_operators or "torchvision" in sys.modules:
        return
    import torch

    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _torchvision_operators.append(library)
    except ImportError:
        pass  # the import that follows says so
