"""The pages of the fields of jobs, plans and clusters, from the classes: types, defaults, limits, and the comments next
to the fields."""

import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from documentation.reference.markdown import page, table
from meshwright.cluster.catalog import entries
from meshwright.cluster.cluster import Cluster, Device, Link, Node
from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.user.call import Call

_LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "length ≥", "max_length": "length ≤"}


def job_page() -> str:
    introduction = (
        "The fields of a job file, with their types and defaults. [The job file](../job.md) explains each of them; "
        "the fields of `plan` are on [their own page](plan.md)."
    )
    return page("Fields of a job", "`meshwright/job.py`", introduction, *_sections(Job, "", skip=("plan",)))


def plan_page() -> str:
    introduction = (
        "The fields of a plan file. The column `numbers` says what a field does to the numerical result: `same` (equal "
        "up to the order of sums), `rounding` (other last bits) or `changes` (other arithmetic). "
        "[The job file](../job.md#the-plan) explains each field, [planning](../plan.md) how plans are found."
    )
    return page("Fields of a plan", "`meshwright/plan.py`", introduction, *_sections(Plan, "", numbers=True))


def cluster_page() -> str:
    introduction = (
        "The fields of a cluster file and of the devices and links in it. [Clusters](../cluster.md) explains them."
    )
    parts = [part for kind in (Cluster, Node, Device, Link) for part in _section(kind, kind.__name__, "", False)]
    return page(
        "Fields of a cluster", "`meshwright/cluster`", introduction, *parts, "## Devices of the catalog", _catalog()
    )


def _catalog() -> str:
    rows = []
    for name, entry in sorted(entries().items()):
        device = entry.device
        rates = ", ".join(f"{dtype} {rate / 1e12:g}" for dtype, rate in device.rates.items())
        memory, bandwidth = device.memory_bytes / 2**30, device.bandwidth_bytes_per_s / 1e9
        rows.append((f"`{name}`", device.kind, f"{memory:.3g}", f"{bandwidth:,.0f}", rates))
    return table(("device", "kind", "memory, GiB", "bandwidth, GB/s", "dense rates, TFLOP/s"), rows)


def _sections(kind: type[BaseModel], prefix: str, skip: tuple[str, ...] = (), numbers: bool = False) -> Iterator[str]:
    """The fields of a class that are no sections of their own, then each section."""
    nested = {
        name: section for name, field in kind.model_fields.items() if (section := _nested(field)) and name not in skip
    }
    if set(kind.model_fields) - set(nested) - set(skip):
        yield from _section(kind, "The file itself", prefix, numbers, skip=(*skip, *nested))
    for name, section in nested.items():
        yield from _section(section, f"`{prefix}{name}`", f"{prefix}{name}.", numbers)


def _nested(field: FieldInfo) -> type[BaseModel] | None:
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel) and not issubclass(kind, Call):
            return kind
    return None


def _section(
    kind: type[BaseModel], title: str, prefix: str, numbers: bool, skip: tuple[str, ...] = ()
) -> Iterator[str]:
    yield f"## {title}"
    if kind not in (Job, Plan):
        yield inspect.cleandoc(kind.__doc__ or "")
    comments = field_comments(kind)
    rows = []
    for name, field in kind.model_fields.items():
        if name in skip:
            continue
        extra = field.json_schema_extra
        mark = (str(extra["numerics"]),) if numbers and isinstance(extra, dict) else ()
        row = (f"`{prefix}{name}`", _type_name(field), _default(field), *mark, comments.get(name, ""))
        rows.append(row)
    yield table(("field", "type", "default", *(["numbers"] if numbers else []), "note"), rows)


def _type_name(field: FieldInfo) -> str:
    limits = ", ".join(
        f"{sign} {getattr(item, name):g}" if isinstance(getattr(item, name), float) else f"{sign} {getattr(item, name)}"
        for item in field.metadata
        for name, sign in _LIMITS.items()
        if getattr(item, name, None) is not None
    )
    return f"{_annotation(field.annotation)}{f' ({limits})' if limits else ''}"


def _annotation(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is type(None):
        return "null"
    if isinstance(kind, type) and issubclass(kind, Call):
        return "`{call: …}`"
    if origin is typing.Annotated:
        return _annotation(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (list, tuple, frozenset, set):
        inner = [_annotation(item) for item in arguments if item is not Ellipsis]
        return f"list of {', '.join(dict.fromkeys(inner))}"
    if origin is dict:
        return f"mapping of {_annotation(arguments[0])} to {_annotation(arguments[1])}"
    if arguments and (origin is typing.Union or "UnionType" in str(origin)):
        return " or ".join(dict.fromkeys(_annotation(item) for item in arguments))
    return {"str": "text", "int": "whole number", "float": "number", "bool": "true or false"}.get(
        getattr(kind, "__name__", str(kind)), f"`{getattr(kind, '__name__', kind)}`"
    )


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return ""
    if isinstance(value, BaseModel):
        return "see there"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"`{value}`" if value not in ((), {}, []) else ("`{}`" if value == {} else "`[]`")


def field_comments(kind: type) -> dict[str, str]:
    """The comments of a class's fields: at the end of a field's line, or in the lines right above it."""
    comments: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(kind).splitlines():
        if re.match(r"    #", line):
            above.append(line.strip("# "))
            continue
        if match := re.match(r"    (\w+): [^#]*?(?:#\s*(.*))?$", line):
            name, beside = match.groups()
            comments[name] = " ".join([*above, beside or ""]).strip()
        above = []
    return comments
