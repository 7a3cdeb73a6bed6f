"""The data of a multi-task job: one JSON-lines file per task, `<split>/<task>.jsonl`.

| kind of task | a line |
| --- | --- |
| classification | `{"text": …, "label": 3}` |
| regression | `{"text": …, "value": 0.5}` |
| similarity | `{"text": …, "other": …, "value": 0.5}`, from -1 to 1 |
| ranking | `{"text": …, "better": …, "worse": …}` |

Texts are strings, whose words are numbered by hashing, or lists of token numbers of at least 1.
"""

import math
import random
from bisect import bisect
from collections.abc import Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from meshwright.errors import InputError, did_you_mean
from meshwright.workloads.task_kinds import TEXTS, Task, Tasks, read_tasks, texts_per_sample
from meshwright.workloads.tasks_generated import generated_tasks
from meshwright.workloads.text.json_lines import JsonLines, text_problem, token_numbers
from meshwright.workloads.text.text_files import DamagePolicy
from meshwright.workloads.text.text_generated import missing_data_error


def tasks(
    tasks: Tasks,
    split: str = "train",
    root: str | None = None,
    synthetic: bool = False,
    vocabulary: int = 30522,
    length: int = 128,
    proportions: Mapping[str, float] | None = None,
    damaged: DamagePolicy = "fatal",
) -> "TaskSamples":
    """Returns a data set of (token numbers (texts, length), (number of the task, value)).

    An epoch has every line of every task once, so tasks occur in proportion to their sizes. With `proportions` (by name
    of the task), each sample's task is drawn at random with these proportions, and then one of the task's lines.
    """
    parsed_tasks = read_tasks(tasks)
    if synthetic:
        folder = generated_tasks(parsed_tasks)
    elif root is not None:
        folder = Path(root)
    else:
        raise missing_data_error(" and ".join(f"{split}/{task.name}.jsonl" for task in parsed_tasks))
    files = tuple(
        JsonLines(
            folder / split / f"{task.name}.jsonl",
            partial(_line_problem, task=task, vocabulary=vocabulary),
            f"{task.kind} {task.classes} {vocabulary}",
            damaged,
        )
        for task in parsed_tasks
    )
    shares = None if proportions is None else _task_shares(proportions, parsed_tasks)
    return TaskSamples(parsed_tasks, files, vocabulary, length, shares)


class TaskSamples(Dataset[tuple[Tensor, Tensor]]):
    """Samples of all tasks, in the form that `tasks` describes. `shares` are the proportions in the order of `tasks`;
    None reads every line once per epoch."""

    def __init__(
        self,
        tasks: tuple[Task, ...],
        files: tuple[JsonLines, ...],
        vocabulary: int,
        length: int,
        shares: list[float] | None,
    ) -> None:
        self.tasks, self.files, self.shares = tasks, files, shares
        self.vocabulary, self.length = vocabulary, length
        self.texts = texts_per_sample(tasks)
        self.ends = list(accumulate(map(len, files)))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        task_number, line_number = self._choose_line(index)
        line, task = self.files[task_number][line_number], self.tasks[task_number]
        texts = np.zeros((self.texts, self.length), np.int64)
        for row, key in enumerate(TEXTS[task.kind]):
            texts[row] = token_numbers(line[key], self.vocabulary, self.length)
        value = line.get("label" if task.kind == "classification" else "value", 0.0)
        return torch.from_numpy(texts), torch.tensor([task_number, value], dtype=torch.float32)

    def _choose_line(self, index: int) -> tuple[int, int]:
        """Returns the number of a task, and the number of a line in that task's file. Random numbers come from Python's
        generator, which the loader seeds by epoch and sample."""
        if self.shares is None:
            number = bisect(self.ends, index)
            return number, index - (self.ends[number] - len(self.files[number]))
        (number,) = random.choices(range(len(self.tasks)), self.shares)
        return number, random.randrange(len(self.files[number]))


def _task_shares(proportions: Mapping[str, float], tasks: tuple[Task, ...]) -> list[float]:
    names = [task.name for task in tasks]
    unknown = next((name for name in proportions if name not in names), None)
    if unknown is not None:
        raise InputError(f"proportions: there is no task '{unknown}'{did_you_mean(unknown, names)}")
    shares = [float(proportions.get(name, 0)) for name in names]
    if not all(share >= 0 for share in shares) or not 0 < sum(shares) < math.inf:
        raise InputError(
            f"proportions are {dict(proportions)}: write numbers that are not negative, at least one above 0"
        )
    return shares


def _line_problem(line: dict[str, Any], task: Task, vocabulary: int) -> str | None:
    """Returns what is wrong with a line of a task; None if nothing is."""
    for key in TEXTS[task.kind]:
        if problem := text_problem(line, key, vocabulary):
            return problem
    if task.kind == "classification":
        label = line.get("label")
        is_class = type(label) is int and 0 <= label < task.classes
        return None if is_class else f"'label' is {label!r}, not a class from 0 to {task.classes - 1}"
    if task.kind == "ranking":
        return None
    value = line.get("value")
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number:
        return f"'value' is {value!r}, not a number"
    if task.kind == "similarity" and not -1 <= float(line["value"]) <= 1:
        return f"'value' is {value!r}, not a similarity from -1 to 1"
    return None
