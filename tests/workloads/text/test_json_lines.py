import json
import os
import pickle
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.workloads.text import json_lines
from meshwright.workloads.text.json_lines import JsonLines, hash_word, text_problem, token_numbers


def no_problem(line: dict[str, Any]) -> None:
    return None


def problem_without_a(line: dict[str, Any]) -> str | None:
    return None if "a" in line else "there is no 'a'"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text('{"a": "ä"}\n\n{"a": 2}\n{"a": 3}')
    return path


def test_lines_are_read_in_any_order_and_process(file: Path) -> None:
    lines = JsonLines(file, no_problem, "any", "fatal")
    assert [lines[index]["a"] for index in (2, 0, 1)] == [3, "ä", 2]
    assert len(lines) == 3
    assert pickle.loads(pickle.dumps(lines))[1] == {"a": 2}
    assert lines._offsets.nbytes == 3 * 8  # nothing else of the file is in memory


@pytest.mark.parametrize(
    ("line", "words"),
    [(b'{"a": ', "it is not JSON"), (b"[1]", "it is a list"), (b'{"b": 1}', "no 'a'"), (b'{"a": "\xff"}', "not JSON")],
)
def test_a_damaged_line_is_an_error_or_skipped_with_a_warning(file: Path, line: bytes, words: str) -> None:
    file.write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    with pytest.raises(InputError, match=f"{file}, line 2: .*{words}.*damaged: skip"):
        JsonLines(file, problem_without_a, "a", "fatal")
    with pytest.warns(UserWarning, match=f"{file}, line 2: .*{words}"):
        lines = JsonLines(file, problem_without_a, "a", "skip")
    assert [line["a"] for line in lines] == [1, 2]


def test_there_is_one_warning_per_damaged_file(file: Path) -> None:
    file.write_text("1\n{}\n2\n3\n")
    with pytest.warns(UserWarning, match=r"line 1: .* \(and 2 more\)") as caught_warnings:
        assert len(JsonLines(file, no_problem, "any", "skip")) == 1
    assert len(caught_warnings) == 1


def test_a_large_file_is_checked_once_for_each_rule(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(file.parent))
    monkeypatch.setattr(json_lines, "LARGE_BYTES", 0)
    file.write_text('{"a": 1}\n{"b": 2}\n{"a": 3}\n')
    checked: list[Any] = []

    def record_and_check(line: dict[str, Any]) -> str | None:
        checked.append(line)
        return problem_without_a(line)

    for _ in range(2):
        with pytest.warns(UserWarning, match="line 2: there is no 'a'"):
            lines = JsonLines(file, record_and_check, "a", "skip")
        assert [line["a"] for line in lines] == [1, 3]
    assert len(checked) == 3
    assert len(JsonLines(file, no_problem, "any", "skip")) == 3
    with pytest.raises(InputError, match="line 2: there is no 'a'"):
        JsonLines(file, record_and_check, "a", "fatal")
    file.write_text('{"a": 1}\n')
    assert len(JsonLines(file, record_and_check, "a", "fatal")) == 1


def test_a_file_without_usable_lines_is_an_error(file: Path) -> None:
    with pytest.raises(InputError, match=r"other\.jsonl: there is no such file: set data\.root"):
        JsonLines(file.with_name("other.jsonl"), no_problem, "any", "fatal")
    file.write_text("\n")
    with pytest.raises(InputError, match=r"data\.jsonl: there is no usable line in it"):
        JsonLines(file, no_problem, "any", "fatal")


def test_texts_become_token_numbers() -> None:
    red, apple = hash_word("red", 1000), hash_word("apple", 1000)
    assert token_numbers("Red  apple", 1000, 4).tolist() == [red, apple, 0, 0]
    assert token_numbers("red apple red", 1000, 2).tolist() == [red, apple]
    assert token_numbers([5, 6], 1000, 3).tolist() == [5, 6, 0]
    assert {hash_word(str(number), 5) for number in range(100)} == {1, 2, 3, 4}
    assert red == 346  # must never change: trained models depend on it


@pytest.mark.parametrize(
    ("value", "words"),
    [("a text", None), ([1, 9], None), ([], None), (7, "neither a text"), ([True], "neither"), (None, "neither")],
)
def test_a_text_is_a_string_or_a_list_of_token_numbers(value: Any, words: str | None) -> None:
    problem = text_problem({"text": value}, "text", 10)
    assert problem is None if words is None else words in str(problem)


@pytest.mark.parametrize("token", [0, 10])
def test_token_numbers_outside_the_vocabulary_are_a_problem(token: int) -> None:
    assert text_problem({"text": [3, token]}, "text", 10) == f"'text' has token {token}, but tokens go from 1 to 9"


def test_a_forked_process_does_not_move_its_parents_file_position(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps({"number": number}) + "\n" for number in range(5000)))
    lines = JsonLines(file, no_problem, "any", "fatal")
    assert lines[0] == {"number": 0}  # opened before the other process starts
    assert lines._file is not None
    before = os.lseek(lines._file.fileno(), 0, os.SEEK_CUR)
    child = get_context("fork").Process(target=lines.__getitem__, args=(4000,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert os.lseek(lines._file.fileno(), 0, os.SEEK_CUR) == before
