"""Files and folders that somebody else may have made. `open_regular_file` does not wait for ever on a pipe, and
`find_unsafe_entry` finds links through which a program that writes in a folder would write elsewhere."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular_file(path: Path, follow_link: bool = True) -> BufferedReader:
    """Opens a file for reading. Raises an `OSError` if it is a folder, a pipe, a socket or a device: opening or reading
    some of these might never end. Without `follow_link`, a symbolic link is an error, too."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_link else os.O_NOFOLLOW))
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def find_unsafe_entry(folder: Path, *names: str) -> str | None:
    """Returns why it is unsafe to write in a folder, as one sentence about an entry at any depth; None if it is safe.
    An entry is unsafe if it is a symbolic link to something outside of the folder, because that would be written, or a
    pipe, a socket or a device. With `names`, only these entries of the folder, and what is in them, are looked at. The
    folder itself may be a symbolic link."""
    root = Path(os.path.realpath(folder))
    entries = [root / name for name in names or ("",)]
    while entries:
        entry = entries.pop()
        try:
            mode = entry.lstat().st_mode
            if stat.S_ISDIR(mode):
                entries += entry.iterdir()
        except OSError:  # it does not exist, or cannot be read: then nothing is written there
            continue
        shown = folder / entry.relative_to(root)
        target = Path(os.path.realpath(entry))
        if stat.S_ISLNK(mode) and (target.is_symlink() or not target.is_relative_to(root)):
            return f"{shown} is a symbolic link to {os.readlink(entry)}, outside of {folder}: remove the link"
        if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            return f"{shown} is not a regular file or folder: remove it"
    return None
