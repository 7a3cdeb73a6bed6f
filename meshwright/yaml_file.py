"""Reads YAML files and validates them as pydantic values. A mistake in a file raises an `InputError` of one line that
names the file and the field."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from meshwright.errors import InputError, did_you_mean

Value = TypeVar("Value", bound=BaseModel)
# libyaml's classes where it is installed: they are fast, and only its writer preserves \x85 ("next line") in a string.
_FastLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_FastDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Loader(_FastLoader):
    """Reads `1e-3` as a number. YAML 1.1, which PyYAML implements, reads it as a string."""


class _Dumper(_FastDumper):
    """Quotes the strings that `_Loader` would read as numbers."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
        list("-+0123456789."),
    )


def parse(text: str) -> Any:
    """Returns the value of a YAML text; raises `yaml.YAMLError` if the text is malformed."""
    return yaml.load(text, _Loader)


def dump(raw: Any) -> str:
    """Returns the value as YAML text, which `parse` reads back unchanged."""
    return yaml.dump(raw, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_mapping(file: Path, what: str) -> dict[str, Any]:
    """Returns the mapping in a YAML file. `what` names the kind of file in error messages (`job`, `plan`, ...)."""
    try:
        text = file.read_text()
    except FileNotFoundError:
        raise InputError(f"{file}: there is no such {what} file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read as a {what} file: {error}") from None
    try:
        raw = parse(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise InputError(f"{file}{where}: not YAML: {problem}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{file}: a {what} file is a YAML mapping, this one is {type(raw).__name__}")
    return raw


def validate(
    kind: type[Value],
    raw: dict[str, Any],
    source: str,
    prefix: str = "",
    hints: Mapping[str, str] | None = None,
) -> Value:
    """Returns raw data as a value of class `kind`, or raises an `InputError` about the first problem. `source` names
    the file and `prefix` the section that the data comes from. `hints` maps the name of a class to a text that is
    appended to the message if a field should hold this class but its value is not a mapping."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        problems = error.errors()
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise InputError(f"{source}: {_one_line(kind, problems[0], prefix, hints or {})}{more}") from None


def _one_line(kind: type[BaseModel], problem: Any, prefix: str, hints: Mapping[str, str]) -> str:
    """Returns one line about a problem that pydantic found: the dotted name of the field, its value and what is wrong
    with the value."""
    location = problem["loc"]
    where = ".".join(str(part) for part in (prefix, *location) if part not in ("", "[key]"))
    if problem["type"] == "extra_forbidden":
        return f"{where} is not a field{did_you_mean(str(location[-1]), _fields_at(kind, location[:-1]))}"
    if problem["type"] == "missing":
        return f"{where} is missing"
    if problem["type"] == "value_error":
        return f"{where}: {problem['ctx']['error']}" if where else str(problem["ctx"]["error"])
    value, message = repr(problem["input"]), problem["msg"]
    hint = hints.get(problem["ctx"]["class_name"], "") if problem["type"] == "model_type" else ""
    return f"{where} is {value if len(value) < 80 else value[:77] + '...'}: {message[0].lower()}{message[1:]}{hint}"


def _fields_at(kind: Any, location: tuple[int | str, ...]) -> list[str]:
    """Returns the names of the fields that exist at a location inside `kind`, from which a correction of an unknown
    field is suggested. The location may lead through nested values, and through tuples and mappings of them."""
    for part in location:
        if isinstance(kind, type) and issubclass(kind, BaseModel) and part in kind.model_fields:
            kind = kind.model_fields[str(part)].annotation
        while not (isinstance(kind, type) and issubclass(kind, BaseModel)) and get_args(kind):
            kind = next((inner for inner in reversed(get_args(kind)) if inner not in (type(None), Ellipsis)), None)
    return list(kind.model_fields) if isinstance(kind, type) and issubclass(kind, BaseModel) else []
