"""Data sets at URLs: `local_root` downloads the folder that `data.root` names into the user's cache, once for all runs
and ranks of this machine, so that every data set reads files of this machine."""

import hashlib
import json
from pathlib import Path

from meshwright.errors import InputError
from meshwright.files.cache import cache_folder, fill_once
from meshwright.files.remote import RemoteFolder, is_url, open_remote
from meshwright.files.storage import require_space

_FIELD = "data.root"


def local_root(root: str) -> str:
    """Returns the folder to read in place of `root`: itself, or if it is a URL, the folder in the cache that has the
    files that are there now. Files that have changed since they were downloaded are downloaded again."""
    if not is_url(root):
        return root
    remote = open_remote(root, _FIELD)
    files = remote.files()
    if not files:
        raise InputError(f"{_FIELD}: there are no files in {remote.url}: name the folder that has them")
    for name in files:
        if any(part in ("", ".", "..") or "\0" in part for part in name.split("/")):
            raise InputError(f"{_FIELD}: {remote.url} has a file called {name!r:.80}, which no folder can have")
    version = hashlib.sha256(json.dumps([remote.url, sorted(files.items())]).encode()).hexdigest()
    folder = cache_folder() / "data" / version[:32]
    return str(fill_once(folder, lambda draft: _download(remote, files, draft)))


def _download(remote: RemoteFolder, files: dict[str, tuple[int, str]], draft: Path) -> None:
    require_space(draft, sum(size for size, _ in files.values()))
    for name, (size, _) in files.items():
        target = draft / name
        target.parent.mkdir(parents=True, exist_ok=True)
        result = remote.download(name, target, size)
        if result is None or result[0] != size:
            raise InputError(f"{_FIELD}: {remote.url}/{name} has changed while it was downloaded: start again")
