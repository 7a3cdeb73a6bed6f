from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.workloads.task_kinds import Task, read_tasks, texts_per_sample


def test_tasks_are_numbered_in_the_order_of_the_mapping() -> None:
    parsed_tasks = read_tasks({"topic": {"kind": "classification", "classes": 3}, "alike": {"kind": "similarity"}})
    assert parsed_tasks == (Task("topic", 0, "classification", 3), Task("alike", 1, "similarity"))
    assert texts_per_sample(parsed_tasks) == 2
    assert texts_per_sample(parsed_tasks[:1]) == 1


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ({}, "tasks is empty"),
        ({"a": "regression"}, r"tasks\.a is 'regression': write \{kind: classification"),
        ({"a": {"kind": "regresion"}}, r"tasks\.a\.kind is 'regresion': did you mean 'regression'"),
        ({"a": {"kind": "classification"}}, "classes is 0: a classification has two or more"),
        ({"a": {"kind": "ranking", "classes": 2}}, "classes is 2"),
        ({"a": {"kind": "ranking", "clases": 2}}, "has no 'clases': did you mean 'classes'"),
        ({"a.b": {"kind": "ranking"}}, r"'a\.b' is the name of a module"),
    ],
)
def test_a_wrong_argument_is_an_input_error(tasks: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_tasks(tasks)
