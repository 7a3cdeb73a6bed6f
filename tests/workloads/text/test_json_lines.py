import json
import os
import pickle
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.workloads.text import json_lines
from meshwright.workloads.text.json_lines import JsonLines, hashed, token_numbers, wrong_text


def no_complaint(found: dict[str, Any]) -> None:
    return None


def needs_a(found: dict[str, Any]) -> str | None:
    return None if "a" in found else "there is no 'a'"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text('{"a": "ä"}\n\n{"a": 2}\n{"a": 3}')
    return path


def test_lines_are_found_by_their_places_in_any_order_and_process(file: Path) -> None:
    lines = JsonLines(file, no_complaint, "any", "fatal")
    assert [lines[index]["a"] for index in (2, 0, 1)] == [3, "ä", 2]
    assert len(lines) == 3
    assert pickle.loads(pickle.dumps(lines))[1] == {"a": 2}
    assert lines._places.nbytes == 3 * 8  # and nothing else of it is in memory


@pytest.mark.parametrize(
    ("line", "words"),
    [(b'{"a": ', "it is not JSON"), (b"[1]", "it is a list"), (b'{"b": 1}', "no 'a'"), (b'{"a": "\xff"}', "not JSON")],
)
def test_a_damaged_line_is_told_and_fatal_or_left_out(file: Path, line: bytes, words: str) -> None:
    file.write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    with pytest.raises(InputError, match=f"{file}, line 2: .*{words}.*damaged: skip"):
        JsonLines(file, needs_a, "a", "fatal")
    with pytest.warns(UserWarning, match=f"{file}, line 2: .*{words}"):
        lines = JsonLines(file, needs_a, "a", "skip")
    assert [line["a"] for line in lines] == [1, 2]


def test_damage_is_told_once_a_file(file: Path) -> None:
    file.write_text("1\n{}\n2\n3\n")
    with pytest.warns(UserWarning, match=r"line 1: .* \(and 2 more\)") as told:
        assert len(JsonLines(file, no_complaint, "any", "skip")) == 1
    assert len(told) == 1


def test_a_large_file_is_looked_at_once_for_each_rule(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(file.parent))
    monkeypatch.setattr(json_lines, "LARGE_BYTES", 0)
    file.write_text('{"a": 1}\n{"b": 2}\n{"a": 3}\n')
    looked: list[Any] = []

    def looking(found: dict[str, Any]) -> str | None:
        looked.append(found)
        return needs_a(found)

    for _ in range(2):
        with pytest.warns(UserWarning, match="line 2: there is no 'a'"):
            lines = JsonLines(file, looking, "a", "skip")
        assert [line["a"] for line in lines] == [1, 3]
    assert len(looked) == 3
    assert len(JsonLines(file, no_complaint, "any", "skip")) == 3
    with pytest.raises(InputError, match="line 2: there is no 'a'"):
        JsonLines(file, looking, "a", "fatal")
    file.write_text('{"a": 1}\n')
    assert len(JsonLines(file, looking, "a", "fatal")) == 1


def test_a_file_without_good_lines_is_told(file: Path) -> None:
    with pytest.raises(InputError, match=r"other\.jsonl: there is no such file: set data\.root"):
        JsonLines(file.with_name("other.jsonl"), no_complaint, "any", "fatal")
    file.write_text("\n")
    with pytest.raises(InputError, match=r"data\.jsonl: there is no good line in it"):
        JsonLines(file, no_complaint, "any", "fatal")


def test_texts_become_token_numbers() -> None:
    red, apple = hashed("red", 1000), hashed("apple", 1000)
    assert token_numbers("Red  apple", 1000, 4).tolist() == [red, apple, 0, 0]
    assert token_numbers("red apple red", 1000, 2).tolist() == [red, apple]
    assert token_numbers([5, 6], 1000, 3).tolist() == [5, 6, 0]
    assert {hashed(str(number), 5) for number in range(100)} == {1, 2, 3, 4}
    assert red == 346  # the same on every machine, or a trained model would be worth nothing


@pytest.mark.parametrize(
    ("value", "words"),
    [("a text", None), ([1, 9], None), ([], None), (7, "neither a text"), ([True], "neither"), (None, "neither")],
)
def test_texts_are_strings_or_numbers(value: Any, words: str | None) -> None:
    found = wrong_text({"text": value}, "text", 10)
    assert found is None if words is None else words in str(found)


@pytest.mark.parametrize("token", [0, 10])
def test_numbers_outside_the_vocabulary_are_told(token: int) -> None:
    assert wrong_text({"text": [3, token]}, "text", 10) == f"'text' has token {token}, but tokens go from 1 to 9"


def test_a_forked_process_reads_at_a_place_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps({"number": number}) + "\n" for number in range(5000)))
    lines = JsonLines(file, no_complaint, "any", "fatal")
    assert lines[0] == {"number": 0}  # opened before the other process is there
    assert lines._file is not None
    before = os.lseek(lines._file.fileno(), 0, os.SEEK_CUR)
    child = get_context("fork").Process(target=lines.__getitem__, args=(4000,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert os.lseek(lines._file.fileno(), 0, os.SEEK_CUR) == before
