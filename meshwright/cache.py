"""The user's cache folder, where files are kept between runs. It may be deleted at any time."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """The folder `$XDG_CACHE_HOME/meshwright`, or `~/.cache/meshwright` if that variable is not an absolute path."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (configured if configured.is_absolute() else Path.home() / ".cache") / "meshwright"


def fill_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Returns `folder`; if it does not exist, `make` fills it first. Of several ranks that call this at once, one fills
    the folder and the others wait. An incomplete folder is never visible, because `make` fills a temporary folder,
    which is then renamed."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
            try:
                make(temporary)
                temporary.chmod(0o755)
                temporary.rename(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return folder
