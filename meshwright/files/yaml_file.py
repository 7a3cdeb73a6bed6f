"""Reads YAML files and validates them as pydantic values. A mistake in a file raises an `InputError` of one line that
names the file and the field."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
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
    """Reads `1e-3` as a number. YAML 1.1, which PyYAML implements, reads it as a string. Knows no bytes (`!!binary`),
    which a job could not store as JSON."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Returns the value of a node. Raises `yaml.YAMLError` where PyYAML raises other errors: for an impossible
        date, or `!!bool x`."""
        if node.tag == "tag:yaml.org,2002:int" and len(node.value) > _LONGEST_NUMBER:
            # One of thousands of digits could not be printed, and one such as 1:1:1:… would take very long to read.
            raise _marked(node, f"a number of {len(node.value):,} characters, more than {_LONGEST_NUMBER}")
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:
            raise _marked(node, str(error)) from None
        except (AttributeError, LookupError, TypeError):
            raise _marked(node, f"{str(node.value)[:50]!r} is no {node.tag.rpartition(':')[2]}") from None


class _Dumper(_FastDumper):
    """Quotes the strings that `_Loader` would read as numbers."""


_Loader.add_constructor("tag:yaml.org,2002:binary", yaml.SafeLoader.construct_undefined)
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
        list("-+0123456789."),
    )


# Far beyond what a person writes. Without these limits a small file could fill the memory or never end.
# PyYAML takes up to 7 s for a million characters, because it makes Python objects of each value, also with libyaml.
_LONGEST_TEXT = 4 * 2**20  # of a cluster or device file, for example; a calibrated GPU has half a million characters
_LONGEST_TEXTS = {"job": 2**20, "plan": 2**20}  # by the kind of file
_LONGEST_NUMBER = 200  # characters
_DEEPEST_NESTING = 100
_MOST_REPEATED_VALUES = 100_000  # values that aliases repeat


def parse(text: str) -> Any:
    """Returns the value of a YAML text. Raises `yaml.YAMLError` if the text is malformed, is nested too deeply, repeats
    too much through aliases, or has a mapping with the same key twice."""
    _check_events(text)
    return yaml.load(text, _Loader)


@dataclass
class _OpenNode:
    """A mapping or sequence whose end the parser has not reached. `size` counts the values in it, with aliases written
    out. `next_is_key` and `keys` are those of a mapping."""

    anchor: str | None
    is_mapping: bool
    next_is_key: bool
    keys: set[str]
    size: int = 1


def _check_events(text: str) -> None:
    """Raises `yaml.YAMLError` for a text that the loader would accept but that is a mistake or an attack. It follows
    the parser's events, which takes no recursion, where the loader would recurse into every level."""
    sizes: dict[str, int] = {}  # of the values with an anchor
    stack: list[_OpenNode] = []
    repeated = 0
    for event in yaml.parse(text, _Loader):
        if isinstance(event, yaml.CollectionEndEvent):
            ended = stack.pop()
            if ended.anchor is not None:
                sizes[ended.anchor] = ended.size
            if stack:
                stack[-1].size += ended.size
            continue
        if not isinstance(event, yaml.NodeEvent):
            continue
        if stack and stack[-1].is_mapping:
            _check_key(event, stack[-1])
        if isinstance(event, yaml.CollectionStartEvent):
            is_mapping = isinstance(event, yaml.MappingStartEvent)
            stack.append(_OpenNode(event.anchor, is_mapping, is_mapping, set()))
            if len(stack) > _DEEPEST_NESTING:
                raise _marked(event, f"it is nested more than {_DEEPEST_NESTING} levels deep")
            continue
        size = 1
        if isinstance(event, yaml.AliasEvent):
            if any(node.anchor == event.anchor for node in stack):
                raise _marked(event, f"the value &{event.anchor} contains itself")
            size = sizes.get(event.anchor or "", 1)
            repeated += size
            if repeated > _MOST_REPEATED_VALUES:
                raise _marked(
                    event, f"aliases such as *{event.anchor} repeat more than {_MOST_REPEATED_VALUES:,} values"
                )
        elif event.anchor is not None:
            sizes[event.anchor] = 1
        if stack:
            stack[-1].size += size


def _check_key(event: yaml.NodeEvent, mapping: _OpenNode) -> None:
    """Notes that the event is the next key or value of the mapping. Raises `yaml.YAMLError` for a key that is there
    twice."""
    if mapping.next_is_key and isinstance(event, yaml.ScalarEvent):
        if event.value in mapping.keys:
            raise _marked(event, f"'{event.value}' is there twice")
        mapping.keys.add(event.value)
    mapping.next_is_key = not mapping.next_is_key


def _marked(event_or_node: Any, problem: str) -> yaml.YAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event_or_node.start_mark)


def dump(raw: Any) -> str:
    """Returns the value as YAML text, which `parse` reads back unchanged."""
    return yaml.dump(raw, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _longest_text(what: str) -> int:
    """Returns how many characters a file of this kind may have."""
    return _LONGEST_TEXTS.get(what, _LONGEST_TEXT)


def read_mapping(file: Path, what: str) -> dict[str, Any]:
    """Returns the mapping in a YAML file. `what` names the kind of file in error messages (`job`, `plan`, ...)."""
    try:
        with file.open() as stream:
            text = stream.read(_longest_text(what) + 1)  # a file such as /dev/zero has no end
    except FileNotFoundError:
        raise InputError(f"{file}: there is no such {what} file") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{file}: cannot be read as a {what} file: {reason}") from None
    return parse_mapping(text, file, what)


def parse_mapping(text: str, file: Path, what: str) -> dict[str, Any]:
    """Returns the mapping in the text of a YAML file. `file` and `what` are named in error messages."""
    if len(text) > _longest_text(what):
        raise InputError(f"{file} is too large: a {what} file has at most {_longest_text(what):,} characters")
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
    the file and `prefix` the section that the data comes from. `hints` maps the name of a class to a text that says
    what to write, for a field that should hold this class but whose value is not a mapping."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        problems = error.errors()
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise InputError(f"{source}: {_one_line(kind, problems[0], prefix, hints or {})}{more}") from None


_YAML_WORDS = {"None": "null", "True": "true", "False": "false"}
# What to say instead of pydantic's message, which names classes and types of Python.
_IN_WORDS = {
    "int_parsing_size": "too large for a whole number",
    "model_type": "write a mapping, such as {name: value}",
    "dict_type": "write a mapping, such as {name: value}",
    "list_type": "write a list, such as [a, b]",
    "tuple_type": "write a list, such as [a, b]",
    "string_type": "write a text",
    "bool_type": "write true or false",
    "bool_parsing": "write true or false",
}


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
    value = _YAML_WORDS.get(repr(problem["input"]), repr(problem["input"]))
    message = _IN_WORDS.get(problem["type"], problem["msg"])
    if problem["type"] == "model_type":
        message = hints.get(problem["ctx"]["class_name"], message)
    return f"{where} is {value if len(value) < 80 else value[:77] + '...'}: {message[0].lower()}{message[1:]}"


def _fields_at(kind: Any, location: tuple[int | str, ...]) -> list[str]:
    """Returns the names of the fields that exist at a location inside `kind`, from which a correction of an unknown
    field is suggested. The location may lead through nested values, and through tuples and mappings of them."""
    for part in location:
        if isinstance(kind, type) and issubclass(kind, BaseModel) and part in kind.model_fields:
            kind = kind.model_fields[str(part)].annotation
        while not (isinstance(kind, type) and issubclass(kind, BaseModel)) and get_args(kind):
            kind = next((inner for inner in reversed(get_args(kind)) if inner not in (type(None), Ellipsis)), None)
    return list(kind.model_fields) if isinstance(kind, type) and issubclass(kind, BaseModel) else []
