import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.errors import InputError
from meshwright.workloads.tasks import tasks
from tests.workloads.text.shares import assert_independent_of_ranks, load_global_batches

TASKS: dict[str, dict[str, Any]] = {
    "topic": {"kind": "classification", "classes": 3},
    "mood": {"kind": "regression"},
    "alike": {"kind": "similarity"},
    "fits": {"kind": "ranking"},
}
LINES: dict[str, list[dict[str, Any]]] = {
    "topic": [{"text": [n], "label": n % 3} for n in range(1, 13)],
    "mood": [{"text": [n], "value": n / 10} for n in range(1, 7)],
    "alike": [{"text": [n], "other": [n, n], "value": 1} for n in range(1, 4)],
    "fits": [{"text": [n], "better": [n, 1], "worse": [2]} for n in range(1, 4)],
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "train").mkdir()
    for name, lines in LINES.items():
        (tmp_path / "train" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_samples_of_all_tasks_have_the_same_shape(root: Path) -> None:
    dataset = tasks(TASKS, root=str(root), vocabulary=50, length=2)
    assert len(dataset) == 24
    first = {"topic": 0, "mood": 12, "alike": 18, "fits": 21}
    second = {name: [part.tolist() for part in dataset[index + 1]] for name, index in first.items()}
    assert second["topic"] == [[[2, 0], [0, 0], [0, 0]], [0, 2]]
    assert second["mood"] == [[[2, 0], [0, 0], [0, 0]], [1, pytest.approx(0.2)]]
    assert second["alike"] == [[[2, 0], [2, 2], [0, 0]], [2, 1]]
    assert second["fits"] == [[[2, 0], [2, 1], [2, 0]], [3, 0]]
    with pytest.raises(IndexError):
        dataset[24]


def samples_by_task(dataset: Any) -> Counter[int]:
    """How many samples of each task number two epochs have."""
    return Counter(int(number) for batch in load_global_batches(dataset, 1) for number in batch[1][:, 0])


def test_tasks_are_sampled_in_proportion_to_their_sizes(root: Path) -> None:
    dataset = tasks(TASKS, root=str(root))
    assert samples_by_task(dataset) == {0: 24, 1: 12, 2: 6, 3: 6}  # every line once in each of two epochs
    assert_independent_of_ranks(dataset)


def test_tasks_are_sampled_by_the_proportions_of_the_job(root: Path) -> None:
    many = root / "train" / "topic.jsonl"
    many.write_text(many.read_text() * 50)
    dataset = tasks(TASKS, root=str(root), proportions={"topic": 1, "fits": 3})
    counts = samples_by_task(dataset)
    assert set(counts) == {0, 3}
    assert counts[3] / (counts[0] + counts[3]) == pytest.approx(0.75, abs=0.05)
    assert_independent_of_ranks(dataset)
    first, second = load_global_batches(dataset, 1)[:1], load_global_batches(dataset, 1, start=(1, 0))[:1]
    assert not torch.equal(first[0][0], second[0][0])


@pytest.mark.parametrize(
    ("name", "line", "words"),
    [
        ("topic", {"text": [1], "label": 3}, "'label' is 3, not a class from 0 to 2"),
        ("topic", {"text": [99], "label": 0}, "'text' has token 99"),
        ("mood", {"text": [1], "value": "high"}, "'value' is 'high', not a number"),
        ("mood", {"text": [1], "value": float("nan")}, "'value' is nan"),
        ("alike", {"text": [1], "other": [1], "value": 2}, "not a similarity"),
        ("fits", {"text": [1], "better": [1]}, "'worse' is neither"),
    ],
)
def test_a_damaged_line_is_an_error_or_skipped_with_a_warning(root: Path, name: str, line: Any, words: str) -> None:
    file = root / "train" / f"{name}.jsonl"
    file.write_text(json.dumps(line) + "\n" + file.read_text())
    with pytest.raises(InputError, match=f"{file}, line 1: .*{words}"):
        tasks(TASKS, root=str(root), vocabulary=50)
    with pytest.warns(UserWarning, match=f"{file}, line 1: .*{words}"):
        assert len(tasks(TASKS, root=str(root), vocabulary=50, damaged="skip")) == 24


def test_wrong_arguments_are_input_errors(root: Path) -> None:
    with pytest.raises(
        InputError, match=r"train/topic\.jsonl and train/mood\.jsonl.*data\.root=.*data\.synthetic=true"
    ):
        tasks(TASKS)
    with pytest.raises(InputError, match="proportions: there is no task 'topics': did you mean 'topic'"):
        tasks(TASKS, root=str(root), proportions={"topics": 1})
    with pytest.raises(InputError, match="write numbers that are not negative"):
        tasks(TASKS, root=str(root), proportions={"topic": 0})


def test_generated_tasks_are_read_by_the_same_loader() -> None:
    dataset = tasks(TASKS, synthetic=True, vocabulary=1000, length=8)
    folder = dataset.files[0].path.parents[1]
    again = tasks(TASKS, root=str(folder), vocabulary=1000, length=8)
    assert torch.equal(again[7][0], dataset[7][0])
    assert [len(file) for file in dataset.files] == [1600, 1200, 800, 400]
    assert {int(dataset[index][1][1]) for index in range(100)} == {0, 1, 2}
    assert len(tasks(TASKS, "val", synthetic=True)) == 400
