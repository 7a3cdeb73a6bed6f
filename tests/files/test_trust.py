"""Keys and signatures: the key of the environment, the secret of the user, and mistakes in either."""

import stat
from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.files.trust import accepted_keys, environment_key, is_signed_by, sign, user_key


@pytest.fixture(autouse=True)
def _no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("MESHWRIGHT_KEY", raising=False)
    monkeypatch.delenv("MESHWRIGHT_KEY_FILE", raising=False)


def test_a_signature_belongs_to_one_key_and_one_text() -> None:
    signature = sign(b"key", b"text")
    assert is_signed_by(b"key", b"text", signature)
    assert not is_signed_by(b"other key", b"text", signature)
    assert not is_signed_by(b"key", b"texts", signature)
    assert not is_signed_by(b"key", b"text", "")
    assert not is_signed_by(b"key", b"text", "é\udcff")


def test_the_key_of_the_environment_is_a_text_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment_key() is None
    (tmp_path / "key").write_text("secret\n")
    monkeypatch.setenv("MESHWRIGHT_KEY_FILE", str(tmp_path / "key"))
    assert environment_key() == b"secret"
    monkeypatch.delenv("MESHWRIGHT_KEY_FILE")
    monkeypatch.setenv("MESHWRIGHT_KEY", "secret")
    assert environment_key() == user_key() == b"secret"
    assert not (tmp_path / "state").exists()


def test_a_mistake_in_the_environment_is_named_without_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_KEY_FILE", str(tmp_path / "missing"))
    with pytest.raises(InputError, match=r"MESHWRIGHT_KEY_FILE: .*missing cannot be read: No such file"):
        environment_key()
    (tmp_path / "empty").write_text(" \n")
    monkeypatch.setenv("MESHWRIGHT_KEY_FILE", str(tmp_path / "empty"))
    with pytest.raises(InputError, match="empty"):
        environment_key()
    monkeypatch.setenv("MESHWRIGHT_KEY_FILE", "/dev/zero")
    with pytest.raises(InputError, match="more than 65,536 bytes"):
        environment_key()
    monkeypatch.setenv("MESHWRIGHT_KEY", "the secret")
    with pytest.raises(InputError, match="both set") as caught:
        user_key()
    assert "the secret" not in str(caught.value)


def test_the_secret_of_a_user_is_created_once_and_private(tmp_path: Path) -> None:
    assert accepted_keys() == []
    secret = user_key()
    file = tmp_path / "state" / "meshwright" / "key"
    assert secret is not None
    assert len(secret) == 64
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert user_key() == secret
    assert accepted_keys() == [secret]
    assert [path.name for path in file.parent.iterdir()] == ["key"]
    file.chmod(0o644)
    with pytest.warns(UserWarning, match=r"key is not used as your key, because .*: delete it"):
        assert user_key() is None, "a secret that others can read signs nothing"
    with pytest.warns(UserWarning, match="key is not used"):
        assert accepted_keys() == []


def test_the_own_secret_is_accepted_beside_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = user_key()
    monkeypatch.setenv("MESHWRIGHT_KEY", "of the team")
    assert user_key() == b"of the team"
    assert accepted_keys() == [b"of the team", secret]


def test_without_a_place_for_the_secret_there_is_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert user_key() is None
    assert accepted_keys() == []
