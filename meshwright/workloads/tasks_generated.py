"""Generated tasks in the language of `text_generated`: each word belongs to a topic and weighs something, and all that
is asked of a text follows from its words."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.cache import cache_folder, made_once
from meshwright.data.order import derive
from meshwright.workloads.task_kinds import Task
from meshwright.workloads.text.text_generated import VERSION, WORDS, word

LENGTH = 8  # words of a text
TOPICS = 4
SIZES = {"train": (1600, 1200, 800, 400), "val": (160, 120, 80, 40)}  # of the first task, the second, and so on


def generated_tasks(tasks: tuple[Task, ...]) -> Path:
    said = derive(VERSION, *(f"{task.name} {task.kind} {task.classes}" for task in tasks))  # a file's name is not long
    return made_once(cache_folder() / "synthetic" / f"tasks-{said:x}", lambda folder: _write(folder, tasks))


def _write(folder: Path, tasks: tuple[Task, ...]) -> None:
    for split, sizes in SIZES.items():
        (folder / split).mkdir()
        for task in tasks:
            random = np.random.RandomState(derive(VERSION, "tasks", split, task.name) % 2**32)
            with (folder / split / f"{task.name}.jsonl").open("w", encoding="utf-8") as file:
                for _ in range(sizes[task.number % len(sizes)]):
                    file.write(json.dumps(_line(random, task), ensure_ascii=False) + "\n")


def _line(random: np.random.RandomState, task: Task) -> dict[str, Any]:
    if task.kind == "classification":
        label = int(random.randint(task.classes))
        return {"text": _text(_about(random, label, task.classes)), "label": label}
    if task.kind == "regression":  # what a word weighs goes from -1 to 1 with its number
        text = random.randint(WORDS, size=LENGTH)
        return {"text": _text(text), "value": round(float(2 * text.mean() / (WORDS - 1) - 1), 4)}
    topic = int(random.randint(TOPICS))
    elsewhere = (topic + int(random.randint(1, TOPICS))) % TOPICS
    text, near, far = (_about(random, about, TOPICS) for about in (topic, topic, elsewhere))
    if task.kind == "ranking":
        return {"text": _text(text), "better": _text(near), "worse": _text(far)}
    alike = bool(random.randint(2))
    return {"text": _text(text), "other": _text(near if alike else far), "value": float(alike)}


def _about(random: np.random.RandomState, topic: int, topics: int) -> np.ndarray:
    """Words of one topic."""
    return random.choice([number for number in range(WORDS) if number % topics == topic], LENGTH)


def _text(words: np.ndarray) -> str:
    return " ".join(map(word, words.tolist()))
