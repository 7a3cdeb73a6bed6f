"""The secret that all ranks of a run share, by which they tell each other from strangers who can reach their store. It
is the text of MESHWRIGHT_TOKEN, or else it is derived from the user's own key (files/trust.py), which is the same on
all machines that share the user's home folder."""

import os

from meshwright.errors import InputError
from meshwright.files.trust import sign, user_key

TOKEN = "MESHWRIGHT_TOKEN"
_FEWEST_CHARACTERS = 16


def find_token(is_on_one_machine: bool) -> bytes:
    """Returns the token of this run. Ranks of one machine that have neither a token nor a key share an empty one.
    Raises an `InputError` if MESHWRIGHT_TOKEN is too short, or if ranks on several machines have neither."""
    text = os.environ.get(TOKEN)
    if text is not None:
        return _checked(text.strip()).encode()
    key = user_key()
    if key is not None:
        return sign(key, b"the token of runs").encode()
    if is_on_one_machine:
        return b""
    raise InputError(
        f"ranks on several machines share a secret, and this user's key cannot be stored in the home folder: set"
        f" {TOKEN} to the same random text for all of them, such as that of `openssl rand -hex 16`"
    )


def _checked(text: str) -> str:
    if len(text) < _FEWEST_CHARACTERS:
        raise InputError(
            f"{TOKEN} has {len(text)} characters: write at least {_FEWEST_CHARACTERS} that nobody can guess, such as"
            " those of `openssl rand -hex 16`"
        )
    return text


def other_token() -> str:
    """Returns the end of a sentence about a rank or machine that has another token: what the user can do."""
    return (
        f"set {TOKEN} to the same secret text on all machines; without it, all of them must see the same home folder,"
        " which has the user's key"
    )
