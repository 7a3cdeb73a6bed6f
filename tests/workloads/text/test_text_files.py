from itertools import pairwise
from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.workloads.text.text_files import PIECE_BYTES, text_files, text_pieces
from meshwright.workloads.text.text_generated import FACTOR, NOISE, SHIFT, WORDS, generated_text, generated_word


def test_all_files_except_hidden_ones_are_listed_in_a_fixed_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", ".git/config", "a/.swap", "a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    assert [str(file.relative_to(tmp_path)) for file in text_files(tmp_path)] == ["a/z.md", "a.txt", "b.txt"]


@pytest.mark.parametrize("name", ["", "nowhere"])
def test_a_folder_without_files_is_an_input_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=f"{tmp_path / name}: there "):
        text_files(tmp_path / name)


@pytest.mark.parametrize("line", ["an äpple\n", "€", "a€", "ab€", "🙂", "a🙂", "ab🙂", "abc🙂"])
def test_a_file_of_any_size_is_read_in_small_pieces(tmp_path: Path, line: str) -> None:
    """Also in files without line breaks, where characters of several bytes must not be cut."""
    text = line[:-1] + line[-1] * 50_000 if not line.endswith("\n") else line * 30_000
    (tmp_path / "long").write_text(text)
    pieces = list(text_pieces(tmp_path / "long", "fatal"))
    assert "".join(pieces) == text
    assert len(pieces) > 1
    assert max(len(piece.encode()) for piece in pieces) < 2 * PIECE_BYTES


def test_a_line_that_is_not_utf8_is_an_error_or_skipped_with_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes(b"one\ntw\xe4\nthree\n")
    with pytest.raises(InputError, match=rf"{file}, line 2: byte 3 is not UTF-8: .*damaged: skip"):
        list(text_pieces(file, "fatal"))
    with pytest.warns(UserWarning, match=f"{file}, line 2"):
        assert list(text_pieces(file, "skip")) == ["one\nthree\n"]
    file.write_bytes(b"\xff\n" * 50)
    with pytest.warns(UserWarning, match="line 1") as caught_warnings:
        assert list(text_pieces(file, "skip")) == []
    assert len(caught_warnings) == 1


def test_an_incomplete_character_at_the_end_of_a_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "torn"
    file.write_bytes(b"a" * (PIECE_BYTES - 1) + b"\xe2")
    with pytest.raises(InputError, match="line 1: byte 1 is not"):
        list(text_pieces(file, "fatal"))


def test_words_are_different_and_nearly_always_follow_the_rule() -> None:
    numbers = {generated_word(number): number for number in range(WORDS)}
    assert len(numbers) == WORDS
    text = [numbers[word] for word in generated_text(3, 4000).split()]
    assert len(text) == 4000
    rule_share = sum((FACTOR * a + SHIFT) % WORDS == b for a, b in pairwise(text)) / 3999
    assert 1 - 1.3 * NOISE < rule_share < 1 - 0.7 * NOISE
    assert generated_text(3, 50) == generated_text(3, 50) != generated_text(4, 50)
