"""What tasks a multi-task job has, as its model, data, loss and metrics are all told: `{name: {kind: …}, …}`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from meshwright.errors import InputError, did_you_mean

Kind = Literal["classification", "regression", "similarity", "ranking"]
# Which texts a line of each kind has: a query is ranked with the document that shall come first and one that shall not.
TEXTS: dict[str, tuple[str, ...]] = {
    "classification": ("text",),
    "regression": ("text",),
    "similarity": ("text", "other"),
    "ranking": ("text", "better", "worse"),
}
Tasks = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Task:
    name: str
    number: int
    kind: Kind
    classes: int = 0


def read_tasks(tasks: Tasks) -> tuple[Task, ...]:
    """Their numbers are their places in the mapping."""
    if not tasks:
        raise InputError("tasks is empty: write {name: {kind: regression}, …}")
    return tuple(_read(name, number, told) for number, (name, told) in enumerate(tasks.items()))


def texts_of(tasks: tuple[Task, ...]) -> int:
    """How many texts a sample has room for: all have the same shape, whatever their task."""
    return max(len(TEXTS[task.kind]) for task in tasks)


def _read(name: str, number: int, told: Any) -> Task:
    if not isinstance(told, Mapping) or "kind" not in told:
        raise InputError(f"tasks.{name} is {told!r}: write {{kind: {' | '.join(get_args(Kind))}}}")
    if not name.isidentifier():
        raise InputError(f"tasks: {name!r} names a module, a file and a metric: use letters, digits and _")
    unknown = next((key for key in told if key not in ("kind", "classes")), None)
    if unknown is not None:
        raise InputError(f"tasks.{name} has no '{unknown}'{did_you_mean(str(unknown), ['kind', 'classes'])}")
    kind, classes = told["kind"], told.get("classes", 0)
    if kind not in get_args(Kind):
        raise InputError(f"tasks.{name}.kind is {kind!r}{did_you_mean(str(kind), get_args(Kind))}")
    if (kind == "classification") != (isinstance(classes, int) and classes > 1):
        raise InputError(f"tasks.{name}: classes is {classes!r}: a classification has two or more, other kinds none")
    return Task(name, number, kind, classes)
