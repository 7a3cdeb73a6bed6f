"""The tasks of a multi-task job. Its model, data and loss all take them as a mapping: `{name: {kind: …}, …}`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from meshwright.errors import InputError, did_you_mean

TaskKind = Literal["classification", "regression", "similarity", "ranking"]
# The keys of the texts in a line of data, by the kind of task. For a ranking, `text` is the query, and the document
# `better` should be ranked before the document `worse`.
TEXTS: dict[str, tuple[str, ...]] = {
    "classification": ("text",),
    "regression": ("text",),
    "similarity": ("text", "other"),
    "ranking": ("text", "better", "worse"),
}
Tasks = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Task:
    """One task of a multi-task job. `number` is the task's index in the mapping. `classes` is 0 for all kinds but
    classifications."""

    name: str
    number: int
    kind: TaskKind
    classes: int = 0


def read_tasks(tasks: Tasks) -> tuple[Task, ...]:
    """Returns the checked tasks in the order of the mapping."""
    if not tasks:
        raise InputError("tasks is empty: write {name: {kind: regression}, …}")
    return tuple(_read_task(name, number, fields) for number, (name, fields) in enumerate(tasks.items()))


def texts_per_sample(tasks: tuple[Task, ...]) -> int:
    """Returns the number of texts of every sample. It is the largest number of all tasks, because all samples must have
    the same shape."""
    return max(len(TEXTS[task.kind]) for task in tasks)


def _read_task(name: str, number: int, fields: Any) -> Task:
    if not isinstance(fields, Mapping) or "kind" not in fields:
        raise InputError(f"tasks.{name} is {fields!r}: write {{kind: {' | '.join(get_args(TaskKind))}}}")
    if not name.isidentifier():
        raise InputError(f"tasks: {name!r} is the name of a module and a file: use letters, digits and _")
    unknown = next((key for key in fields if key not in ("kind", "classes")), None)
    if unknown is not None:
        raise InputError(f"tasks.{name} has no '{unknown}'{did_you_mean(str(unknown), ['kind', 'classes'])}")
    kind, classes = fields["kind"], fields.get("classes", 0)
    if kind not in get_args(TaskKind):
        raise InputError(f"tasks.{name}.kind is {kind!r}{did_you_mean(str(kind), get_args(TaskKind))}")
    if (kind == "classification") != (isinstance(classes, int) and classes > 1):
        raise InputError(
            f"tasks.{name}: classes is {classes!r}: a classification has two or more, other kinds have none"
        )
    return Task(name, number, kind, classes)
