"""Where the token of a run comes from."""

from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.processes.token.run_token import find_token


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MESHWRIGHT_TOKEN", "MESHWRIGHT_KEY", "MESHWRIGHT_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def test_it_is_that_of_the_environment_or_of_the_users_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    derived = find_token(False)
    key = tmp_path / "meshwright" / "key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert derived == find_token(True)
    assert key.read_bytes().strip() not in derived
    monkeypatch.setenv("MESHWRIGHT_TOKEN", " 0123456789abcdef\n")
    assert find_token(False) == b"0123456789abcdef"


def test_one_that_can_be_guessed_is_refused_but_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("", "secret"):
        monkeypatch.setenv("MESHWRIGHT_TOKEN", text)
        with pytest.raises(InputError, match=f"MESHWRIGHT_TOKEN has {len(text)} characters: write") as error:
            find_token(True)
        assert "secret" not in str(error.value)


def test_only_ranks_of_one_machine_need_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))  # in which no folder can be made
    assert find_token(True) == b""
    with pytest.raises(InputError, match="set MESHWRIGHT_TOKEN to the same random text for all of them"):
        find_token(False)
