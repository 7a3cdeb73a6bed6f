"""Generated data for multi-task jobs, in the language of `text_generated`. Each word has a topic and a value, and the
words of a text determine all its labels and values."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.order import derive_seed
from meshwright.files.cache import cache_folder, fill_once
from meshwright.workloads.task_kinds import Task
from meshwright.workloads.text.text_generated import VERSION, WORDS, generated_word

LENGTH = 8  # words per text
TOPICS = 4
SIZES = {"train": (1600, 1200, 800, 400), "val": (160, 120, 80, 40)}  # lines of the first task, the second, and so on


def generated_tasks(tasks: tuple[Task, ...]) -> Path:
    """Returns the folder of the generated files of these tasks, and writes them if they are not in the cache."""
    # A hash, because a folder name with all tasks could be too long.
    key = derive_seed(VERSION, *(f"{task.name} {task.kind} {task.classes}" for task in tasks))
    return fill_once(cache_folder() / "synthetic" / f"tasks-{key:x}", lambda folder: _write(folder, tasks))


def _write(folder: Path, tasks: tuple[Task, ...]) -> None:
    for split, sizes in SIZES.items():
        (folder / split).mkdir()
        for task in tasks:
            random = np.random.RandomState(derive_seed(VERSION, "tasks", split, task.name) % 2**32)
            with (folder / split / f"{task.name}.jsonl").open("w", encoding="utf-8") as file:
                for _ in range(sizes[task.number % len(sizes)]):
                    file.write(json.dumps(_line(random, task), ensure_ascii=False) + "\n")


def _line(random: np.random.RandomState, task: Task) -> dict[str, Any]:
    if task.kind == "classification":
        label = int(random.randint(task.classes))
        return {"text": _text(_draw_words(random, label, task.classes)), "label": label}
    if task.kind == "regression":  # the value of a word grows with its number, from -1 to 1
        text = random.randint(WORDS, size=LENGTH)
        return {"text": _text(text), "value": round(float(2 * text.mean() / (WORDS - 1) - 1), 4)}
    topic = int(random.randint(TOPICS))
    other_topic = (topic + int(random.randint(1, TOPICS))) % TOPICS
    text, same, other = (_draw_words(random, number, TOPICS) for number in (topic, topic, other_topic))
    if task.kind == "ranking":
        return {"text": _text(text), "better": _text(same), "worse": _text(other)}
    is_similar = bool(random.randint(2))
    return {"text": _text(text), "other": _text(same if is_similar else other), "value": float(is_similar)}


def _draw_words(random: np.random.RandomState, topic: int, topics: int) -> np.ndarray:
    """Draws the numbers of the words of a text about one topic."""
    return random.choice([number for number in range(WORDS) if number % topics == topic], LENGTH)


def _text(words: np.ndarray) -> str:
    return " ".join(map(generated_word, words.tolist()))
