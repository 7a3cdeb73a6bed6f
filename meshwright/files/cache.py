"""The user's cache folder, where files are kept between runs. It may be deleted at any time."""

import atexit
import fcntl
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

from meshwright.errors import RemoteStorageError, StorageError
from meshwright.files.storage import writing

_temporary_folders: dict[Path, Path] = {}  # by the folder of the cache that they stand for


def cache_folder() -> Path:
    """The folder `$XDG_CACHE_HOME/meshwright`, or `~/.cache/meshwright` if that variable is not an absolute path."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (configured if configured.is_absolute() else Path.home() / ".cache") / "meshwright"


def fill_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Returns `folder`; if it does not exist, `make` fills it first. Of several ranks that call this at once, one fills
    the folder and the others wait. An incomplete folder is never visible, because `make` fills a temporary folder,
    which is then renamed. If the cache cannot take the files, the process fills a temporary folder of its own, which is
    returned and deleted when the process ends."""
    if folder in _temporary_folders:
        return _temporary_folders[folder]
    try:
        with writing(folder):
            return _fill_in_cache(folder, make)
    except RemoteStorageError:  # what `make` reads is missing, not space in the cache
        raise
    except StorageError as error:
        warnings.warn(f"{error}; until then these files are made in every run", stacklevel=2)
        _temporary_folders[folder] = _fill_temporary(make)
        return _temporary_folders[folder]


def _fill_in_cache(folder: Path, make: Callable[[Path], None]) -> Path:
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


def _fill_temporary(make: Callable[[Path], None]) -> Path:
    temporary = Path(tempfile.mkdtemp(prefix="meshwright-"))
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not in a forked process that ends earlier
            shutil.rmtree(temporary, ignore_errors=True)

    atexit.register(remove)
    with writing(temporary):
        make(temporary)
    return temporary
