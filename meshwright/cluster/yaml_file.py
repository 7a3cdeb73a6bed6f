"""YAML files of this room as checked values: every mistake in one is one line that names the file and the field."""

from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from meshwright.errors import InputError, did_you_mean

Value = TypeVar("Value", bound=BaseModel)
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_mapping(file: Path, what: str) -> dict[str, Any]:
    try:
        raw = yaml.load(file.read_text(), _Loader)
    except FileNotFoundError:
        raise InputError(f"{file}: there is no such {what} file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read as a {what} file: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise InputError(f"{file}{where}: not YAML: {getattr(error, 'problem', None) or 'cannot be read'}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{file}: a {what} file is a YAML mapping, this one is {type(raw).__name__}")
    return raw


def validated(kind: type[Value], raw: dict[str, Any], source: str) -> Value:
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        problems = error.errors()
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise InputError(f"{source}: {_one_line(kind, problems[0])}{more}") from None


def _one_line(kind: type[BaseModel], problem: Any) -> str:
    location = problem["loc"]
    where = ".".join(str(part) for part in location if part != "[key]")
    if problem["type"] == "extra_forbidden":
        return f"{where} is not a field{did_you_mean(str(location[-1]), _fields_around(kind, location[:-1]))}"
    if problem["type"] == "missing":
        return f"{where} is missing"
    if problem["type"] == "value_error":
        return f"{where}: {problem['ctx']['error']}" if where else str(problem["ctx"]["error"])
    given, message = repr(problem["input"]), problem["msg"]
    return f"{where} is {given if len(given) < 80 else given[:77] + '...'}: {message[0].lower()}{message[1:]}"


def _fields_around(kind: Any, location: tuple[int | str, ...]) -> list[str]:
    """The fields known where an unknown one was found: steps through values, tuples and mappings of them."""
    for part in location:
        if isinstance(kind, type) and issubclass(kind, BaseModel) and part in kind.model_fields:
            kind = kind.model_fields[str(part)].annotation
        while not (isinstance(kind, type) and issubclass(kind, BaseModel)) and get_args(kind):
            kind = next((inner for inner in reversed(get_args(kind)) if inner not in (type(None), Ellipsis)), None)
    return list(kind.model_fields) if isinstance(kind, type) and issubclass(kind, BaseModel) else []
