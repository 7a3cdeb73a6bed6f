"""The keys with which Meshwright signs what it writes, so that it can tell later who wrote it. A signature is an
HMAC-SHA256 over the signed bytes. The key is the one of the environment, which a team can share, or a secret file of
this user, which is created when it is first needed."""

import hashlib
import hmac
import os
import secrets
import warnings
from contextlib import suppress
from pathlib import Path

from meshwright.errors import InputError

_LARGEST_KEY_BYTES = 65_536


def environment_key() -> bytes | None:
    """Returns the text of MESHWRIGHT_KEY, or the contents of the file that MESHWRIGHT_KEY_FILE names, without white
    space at both ends; None if neither variable is set. Raises `InputError` if both are set, if the file cannot be
    read, or if the key is empty."""
    text, file = os.environ.get("MESHWRIGHT_KEY"), os.environ.get("MESHWRIGHT_KEY_FILE")
    if text is not None and file is not None:
        raise InputError("MESHWRIGHT_KEY and MESHWRIGHT_KEY_FILE are both set: unset one of them")
    if text is not None:
        return _checked(os.fsencode(text), "MESHWRIGHT_KEY")
    if file is not None:
        return _checked(_read_key_file(file), f"MESHWRIGHT_KEY_FILE ({file})")
    return None


def user_key() -> bytes | None:
    """Returns the key of the environment, or else the secret of this user, which is created if it does not exist. None
    if the secret cannot be stored, or if its file belongs to another user or can be read by others."""
    key = environment_key()
    return _stored_secret(create=True) if key is None else key


def accepted_keys() -> list[bytes]:
    """Returns the keys whose signatures are this user's own: that of the environment, and the secret of this user,
    which is not created. Each is left out if it does not exist."""
    keys = (environment_key(), _stored_secret(create=False))
    return [key for key in keys if key is not None]


def sign(key: bytes, data: bytes) -> str:
    """Returns the signature of the data as a text of 64 hexadecimal digits."""
    return hmac.new(key, data, hashlib.sha256).hexdigest()


def is_signed_by(key: bytes, data: bytes, signature: str) -> bool:
    """Returns whether `sign` returns this signature for the key and the data. The comparison takes equally long for
    right and wrong signatures."""
    return hmac.compare_digest(sign(key, data).encode(), signature.encode(errors="surrogatepass"))


def _read_key_file(file: str) -> bytes:
    try:
        with Path(file).expanduser().open("rb") as stream:
            key = stream.read(_LARGEST_KEY_BYTES + 1)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"MESHWRIGHT_KEY_FILE: {file} cannot be read: {reason}") from None
    if len(key) > _LARGEST_KEY_BYTES:
        raise InputError(f"MESHWRIGHT_KEY_FILE: {file} has more than {_LARGEST_KEY_BYTES:,} bytes: it is no key file")
    return key


def _checked(key: bytes, source: str) -> bytes:
    if not key.strip():
        raise InputError(f"{source} is empty: set it to a secret text, or unset it")
    return key.strip()


def _state_folder() -> Path:
    """Returns `$XDG_STATE_HOME/meshwright`, or `~/.local/state/meshwright` if that variable is not an absolute path."""
    configured = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (configured if configured.is_absolute() else Path.home() / ".local" / "state") / "meshwright"


def _stored_secret(create: bool) -> bytes | None:
    """Returns the secret of this user; None if it does not exist, or as `user_key` says."""
    try:
        file = _state_folder() / "key"
        if create and not file.exists():
            _create_secret(file)
        return _read_secret(file)
    except (OSError, RuntimeError):  # RuntimeError: this user has no home folder
        return None


def _create_secret(file: Path) -> None:
    """Writes a random secret that only this user can read. If two processes do this at once, both read the same secret
    afterwards, because a hard link never replaces a file."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = file.with_name(f".key-{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as stream:
            stream.write(secrets.token_hex(32))
        with suppress(FileExistsError):
            os.link(draft, file)
    finally:
        draft.unlink()


def _read_secret(file: Path) -> bytes | None:
    """Returns the secret; None if the file is empty, or, with a warning, if it belongs to another user or can be read
    or written by others."""
    with file.open("rb") as stream:
        status = os.fstat(stream.fileno())
        secret = stream.read(_LARGEST_KEY_BYTES).strip()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        warnings.warn(
            f"{file} is not used as your key, because other users own it or can read or write it: delete it, so that"
            " the next `train` creates a new one; if nobody has read it, `chmod 600` lets you keep it",
            stacklevel=2,
        )
        return None
    return secret or None
