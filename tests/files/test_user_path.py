"""Paths that users write: `~` is replaced, and impossible paths are refused in one line."""

from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.files.user_path import expand_home, user_path


def test_a_home_folder_is_expanded_and_a_variable_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert expand_home("~/runs", "output") == "/home/me/runs"
    assert user_path("~", "output") == Path("/home/me")
    assert expand_home("$HOME/a~b", "output") == "$HOME/a~b"


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("", "output is empty: write a path"),
        ("a\0b", r"output is 'a\x00b': a path cannot contain the character NUL"),
        ("~no such user/x", "~no such user is no user of this machine; write ./~no such user for a file"),
        ("a/" * 2500, "a path has at most 4095 bytes, this has 5000"),
        ("x" * 300, "a name in a path has at most 255 bytes, one here has 300"),
        ("é" * 200, "a name in a path has at most 255 bytes, one here has 400"),
        ("\ud800", "a path cannot contain half of a surrogate pair"),
    ],
)
def test_an_impossible_path_is_refused(path: str, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        expand_home(path, "output")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
