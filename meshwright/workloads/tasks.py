"""The data of several tasks: a JSON-lines file each, `<split>/<task>.jsonl`, and which task a sample is of.

| kind | a line |
| --- | --- |
| classification | `{"text": …, "label": 3}` |
| regression | `{"text": …, "value": 0.5}` |
| similarity | `{"text": …, "other": …, "value": 0.5}`, from -1 to 1 |
| ranking | `{"text": …, "better": …, "worse": …}` |

Texts are strings, whose words are numbered by hashing, or lists of token numbers from 1 on.
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
from meshwright.workloads.task_kinds import TEXTS, Task, Tasks, read_tasks, texts_of
from meshwright.workloads.tasks_generated import generated_tasks
from meshwright.workloads.text.json_lines import JsonLines, token_numbers, wrong_text
from meshwright.workloads.text.text_files import Damaged
from meshwright.workloads.text.text_generated import no_data


def tasks(
    tasks: Tasks,
    split: str = "train",
    root: str | None = None,
    synthetic: bool = False,
    vocabulary: int = 30522,
    length: int = 128,
    proportions: Mapping[str, float] | None = None,
    damaged: Damaged = "fatal",
) -> "TaskSamples":
    """(token numbers (texts, length), (number of the task, value)): every line of every task once an epoch, so tasks
    come in proportion to their sizes. With `proportions` by task a sample's task is drawn by these, and its line."""
    read = read_tasks(tasks)
    if synthetic:
        folder = generated_tasks(read)
    elif root is not None:
        folder = Path(root)
    else:
        raise no_data(" and ".join(f"{split}/{task.name}.jsonl" for task in read))
    files = tuple(
        JsonLines(
            folder / split / f"{task.name}.jsonl",
            partial(_wrong, task=task, vocabulary=vocabulary),
            f"{task.kind} {task.classes} {vocabulary}",
            damaged,
        )
        for task in read
    )
    shares = None if proportions is None else _shares(proportions, read)
    return TaskSamples(read, files, vocabulary, length, shares)


class TaskSamples(Dataset[tuple[Tensor, Tensor]]):
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
        self.texts = texts_of(tasks)
        self.ends = list(accumulate(map(len, files)))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number, line = self._place(index)
        found, task = self.files[number][line], self.tasks[number]
        given = np.zeros((self.texts, self.length), np.int64)
        for place, key in enumerate(TEXTS[task.kind]):
            given[place] = token_numbers(found[key], self.vocabulary, self.length)
        value = found.get("label" if task.kind == "classification" else "value", 0.0)
        return torch.from_numpy(given), torch.tensor([number, value], dtype=torch.float32)

    def _place(self, index: int) -> tuple[int, int]:
        """The task and the line of it. What is drawn is drawn from Python's generator, which the loader seeds by epoch
        and sample."""
        if self.shares is None:
            number = bisect(self.ends, index)
            return number, index - (self.ends[number] - len(self.files[number]))
        (number,) = random.choices(range(len(self.tasks)), self.shares)
        return number, random.randrange(len(self.files[number]))


def _shares(proportions: Mapping[str, float], tasks: tuple[Task, ...]) -> list[float]:
    names = [task.name for task in tasks]
    unknown = next((name for name in proportions if name not in names), None)
    if unknown is not None:
        raise InputError(f"proportions: there is no task '{unknown}'{did_you_mean(unknown, names)}")
    shares = [float(proportions.get(name, 0)) for name in names]
    if not all(share >= 0 for share in shares) or not 0 < sum(shares) < math.inf:
        raise InputError(f"proportions are {dict(proportions)}: write numbers from 0 on, at least one above it")
    return shares


def _wrong(line: dict[str, Any], task: Task, vocabulary: int) -> str | None:
    for key in TEXTS[task.kind]:
        if complaint := wrong_text(line, key, vocabulary):
            return complaint
    if task.kind == "classification":
        label = line.get("label")
        fits = type(label) is int and 0 <= label < task.classes
        return None if fits else f"'label' is {label!r}, not a class from 0 to {task.classes - 1}"
    if task.kind == "ranking":
        return None
    value = line.get("value")
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number:
        return f"'value' is {value!r}, not a number"
    if task.kind == "similarity" and not -1 <= float(line["value"]) <= 1:
        return f"'value' is {value!r}, not a similarity from -1 to 1"
    return None
