"""Results of checks that are kept in the user's cache folder, one small file for each digest. The folder may be deleted
at any time, and a damaged file counts as none: the check is made again."""

import json
from contextlib import suppress
from pathlib import Path

from meshwright.errors import MeshwrightError
from meshwright.files.cache import cache_folder
from meshwright.files.storage import write_atomically


def is_kept(digest: str) -> bool:
    """Whether a training with this digest was found equal to one device before."""
    try:
        contents = json.loads(_file(digest).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(contents, dict) and contents.get("digest") == digest and contents.get("equal") is True


def keep(digest: str, plan: str, error: float, seconds: float) -> bool:
    """Keeps that a training was found equal; `plan` and the numbers are for people who read the file. Returns False if
    the cache folder cannot take it."""
    contents = {"digest": digest, "equal": True, "plan": plan, "largest_error": error, "seconds": round(seconds, 1)}
    with suppress(OSError, MeshwrightError):
        _file(digest).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(_file(digest), json.dumps(contents))
        return True
    return False


def _file(digest: str) -> Path:
    return cache_folder() / "checked" / f"{digest}.json"
