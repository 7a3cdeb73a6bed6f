"""Where things are kept between runs: the user's cache folder (XDG), which may be deleted at any time."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/meshwright`, which is `~/.cache/meshwright` where nobody says otherwise."""
    told = os.path.expandvars("$XDG_CACHE_HOME")
    base = Path(told) if Path(told).is_absolute() else Path("~/.cache").expanduser()
    return base / "meshwright"


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, filled by the first process that asks for it; ranks that come meanwhile wait. It is there whole or not
    at all: `make` fills another one, which then takes its name."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
            try:
                make(aside)
                aside.chmod(0o755)
                aside.rename(folder)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    return folder
