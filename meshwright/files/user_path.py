"""Paths as a user writes them in a job or on the command line: `~` stands for a home folder, and a path that no file
can have is refused. Environment variables in a path are not replaced."""

import os
from pathlib import Path

from meshwright.errors import InputError

_LONGEST_PATH_BYTES = 4_095  # of Linux
_LONGEST_NAME_BYTES = 255  # of nearly all file systems


def expand_home(path: str, field: str) -> str:
    """Returns the path with `~` or `~user` at its beginning replaced by that home folder. Raises an `InputError`, which
    begins with the name of the field or option, if there is no such user, or if no file can have this path."""
    if not path:
        raise InputError(f"{field} is empty: write a path, or . for the working folder")
    if "\0" in path:
        raise InputError(f"{field} is {_cut(path)}: a path cannot contain the character NUL")
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = expanded.partition("/")[0]
        raise InputError(f"{field} is {_cut(path)}: {user} is no user of this machine; write ./{user} for a file")
    try:
        size, names = len(os.fsencode(expanded)), [os.fsencode(name) for name in expanded.split("/")]
    except UnicodeEncodeError:
        raise InputError(f"{field} is {_cut(path)}: a path cannot contain half of a surrogate pair") from None
    if size > _LONGEST_PATH_BYTES:
        raise InputError(f"{field} is {_cut(path)}: a path has at most {_LONGEST_PATH_BYTES} bytes, this has {size}")
    longest = max(map(len, names))
    if longest > _LONGEST_NAME_BYTES:
        raise InputError(
            f"{field} is {_cut(path)}: a name in a path has at most {_LONGEST_NAME_BYTES} bytes, one here has {longest}"
        )
    return expanded


def user_path(path: str | Path, field: str) -> Path:
    """Returns the path of `expand_home`."""
    return Path(expand_home(str(path), field))


def _cut(path: str) -> str:
    text = repr(path)
    return text if len(text) < 80 else f"{text[:77]}..."
