"""Writes files so that a full disk, a used-up quota, a read-only disk or a vanished folder ends in one line that names
the disk and the bytes that are missing, and so that a reader never sees half a file."""

import errno
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.errors import InputError, MeshwrightError, StorageError, chain_of
from meshwright.numbers.units import bytes_text

# `require_space` leaves this many bytes for the file system's own tables and for small files such as logs.
_RESERVED_BYTES = 256 * 1024
# Libraries write the number of an error into their messages: Python's `[Errno 28]`, Rust's `(os error 28)`.
_NUMBER_IN_MESSAGE = re.compile(r"\[Errno (\d+)\]|\(os error (\d+)\)")
_UNREACHABLE = (errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.EHOSTDOWN)
# These errors are about the path that they name. If it is another one than is written, somebody reads a file that does
# not exist, for instance.
_ABOUT_ONE_PATH = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENAMETOOLONG)
_ADVICE = "free some space there, or choose an output folder on another disk"


@dataclass(frozen=True)
class Disk:
    """The file system that a path is on. `size_bytes` is 0 if the file system does not say how large it is, and
    `free_inodes` is None if it does not count its files."""

    mount_point: str
    kind: str
    size_bytes: int
    free_bytes: int
    free_inodes: int | None
    is_read_only: bool

    def __str__(self) -> str:
        details = [self.kind] * bool(self.kind) + [bytes_text(self.size_bytes)] * bool(self.size_bytes)
        return f"the disk mounted at {self.mount_point}" + (f" ({', '.join(details)})" if details else "")


def disk_of(path: Path) -> Disk:
    """Returns the disk that `path` is on or, where it does not exist, the disk of its nearest folder that does."""
    folder = _existing_folder(path)
    state = os.statvfs(folder)
    mount_point, kind = _mount_of(folder)
    return Disk(
        mount_point,
        kind,
        size_bytes=state.f_blocks * state.f_frsize,
        free_bytes=state.f_bavail * state.f_frsize,
        free_inodes=state.f_favail if state.f_files else None,
        is_read_only=bool(state.f_flag & os.ST_RDONLY),
    )


def require_space(path: Path, needed: int) -> None:
    """Raises a `StorageError` if the disk of `path` has no room for `needed` more bytes, before any of them is
    written."""
    disk = disk_of(path)
    if disk.is_read_only:
        raise _error(errno.EROFS, path, path, needed, disk)
    if not _has_room(disk, needed):
        raise _error(errno.ENOSPC, path, path, needed + _RESERVED_BYTES, disk)


def has_space(path: Path, needed: int) -> bool:
    """Whether the disk of `path` has room for `needed` more bytes."""
    return _has_room(disk_of(path), needed)


def _has_room(disk: Disk, needed: int) -> bool:
    has_bytes = disk.size_bytes == 0 or disk.free_bytes >= needed + _RESERVED_BYTES
    return has_bytes and disk.free_inodes != 0


@contextmanager
def writing(path: Path, needed: int | None = None) -> Iterator[None]:
    """Raises a `StorageError` instead of an exception inside it that means that the disk or folder cannot take what is
    written. `path` is the file or folder that is written, and `needed` the number of bytes, if it is known. A
    half-written file must be removed outside of it, because libraries hide the reason of some errors, and then only the
    disk that is still full shows it."""
    handled_before = sys.exc_info()[1]
    try:
        free_before = disk_of(path).free_bytes
    except OSError:
        free_before = None
    try:
        yield
    except (MeshwrightError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch.distributed.checkpoint's exception is no Exception
        problem = _find_problem(list(chain_of(error, handled_before)), path, needed, free_before)
        if problem is None:
            raise
        raise problem from error


@contextmanager
def replacing(path: Path, needed: int | None = None) -> Iterator[Path]:
    """Yields the path of a draft to write, in the same folder. When the context ends, the draft replaces the file
    `path`: readers see the old contents or the new ones, also after a power failure. If the context fails, the draft is
    removed and the old file stays. Raises a `StorageError` as `writing` does."""
    target = path.resolve() if os.path.islink(path) else path  # a symbolic link stays one
    # The name ends as that of the file, because some libraries look at it.
    draft = target.with_name(f".new-{secrets.token_hex(4)}-{target.name[-100:]}")
    try:
        with writing(target, needed):
            yield draft
            with draft.open("rb") as file:
                if os.path.exists(target):
                    os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
                os.fsync(file.fileno())
            draft.replace(target)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, contents: str | bytes) -> None:
    """Replaces a file as `replacing` does. A path that is no file, such as /dev/stdout, is written and not replaced."""
    data = contents.encode() if isinstance(contents, str) else contents
    if os.path.exists(path) and not os.path.isfile(path):
        with writing(path):
            path.write_bytes(data)
        return
    with replacing(path, len(data)) as draft:
        draft.write_bytes(data)


def describe_storage_problem(error: OSError, path: Path, needed: int | None = None) -> StorageError | None:
    """Returns the error to show to the user if `error` means that the disk or folder of `path` cannot take what is
    written; None if it means anything else. `needed` is the number of bytes to write, if it is known."""
    if error.errno is None:
        return None
    return _describe(error.errno, path, _named_path(error) or path, needed, None)


def output_error(error: OSError, folder: Path, source: str = "output") -> MeshwrightError:
    """Returns the error for a folder in which nothing can be written: a `StorageError` if its disk has a problem, and
    an `InputError` if the folder is wrong. `source` is the field or option in which the user wrote it."""
    problem = None if error.errno in _ABOUT_ONE_PATH else describe_storage_problem(error, folder)
    return problem or InputError(f"{source}: cannot write in '{folder}': {error.strerror}")


def _find_problem(
    chain: list[BaseException], path: Path, needed: int | None, free_before: int | None
) -> StorageError | None:
    """Returns the problem of the disk or folder that led to these exceptions; None if there is none. `free_before` is
    the number of bytes that were free before the first was written; None if it is unknown."""
    for error in chain:
        if isinstance(error, StorageError):
            return error
        for number in _numbers_of(error):
            problem = _describe(number, path, _named_path(error) or path, needed, free_before)
            if problem is not None:
                return problem
    if not any(isinstance(error, RuntimeError) for error in chain):
        return None
    # torch's writer of files raises a RuntimeError that does not contain the reason.
    return _present_problem(path, needed, free_before)


def _numbers_of(error: BaseException) -> list[int]:
    """Returns the number of the system's error; those in the message of an exception that has none itself."""
    if isinstance(error, OSError) and error.errno is not None:
        return [error.errno]
    return [int(python or rust) for python, rust in _NUMBER_IN_MESSAGE.findall(str(error))]


def _named_path(error: BaseException) -> Path | None:
    """Returns the path that the system's error is about; None if it does not name one."""
    name = error.filename if isinstance(error, OSError) else None
    return Path(os.fsdecode(name)) if isinstance(name, str | bytes) else None


def _present_problem(path: Path, needed: int | None, free_before: int | None) -> StorageError | None:
    """Returns what is wrong now with the folder of `path` or with its disk; None if nothing is. `free_before` are the
    bytes that were free before they were written."""
    if not os.path.exists(path.parent):
        return _describe(errno.ENOENT, path, path, needed, free_before)
    disk = disk_of(path)
    if disk.is_read_only:
        return _error(errno.EROFS, path, path, needed, disk)
    is_full = disk.free_bytes < _RESERVED_BYTES or (free_before is not None and free_before < (needed or 0))
    if disk.free_inodes == 0 or (disk.size_bytes and is_full):
        return _describe(errno.ENOSPC, path, path, needed, free_before)
    return None


def _describe(number: int, path: Path, named: Path, needed: int | None, free_before: int | None) -> StorageError | None:
    """Returns the error for the system's error with this number; None if it is another problem than that of writing
    `path`. `named` is the path that the system's error names."""
    is_elsewhere = not _is_inside(named, path.parent)
    if number not in _SENTENCES or (is_elsewhere and number in _ABOUT_ONE_PATH):
        return None
    path = named if is_elsewhere else path
    if number == errno.ENOENT and _first_missing(named) is None and _first_missing(path) is None:
        return None
    try:
        disk = disk_of(path)
    except OSError:
        disk = Disk(str(path), "", 0, 0, None, False)
    if number == errno.ENOSPC and needed is not None and free_before is not None and free_before < needed:
        # The bytes that were free before are used by what was written so far, and will be free again.
        disk = replace(disk, free_bytes=free_before)
    return _error(number, path, named, needed, disk)


def _is_inside(path: Path, folder: Path) -> bool:
    return Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder))


def _error(number: int, path: Path, named: Path, needed: int | None, disk: Disk) -> StorageError:
    return StorageError(f"{path}: {_SENTENCES[number](named, needed, disk)}")


def _full(named: Path, needed: int | None, disk: Disk) -> str:
    if disk.free_inodes == 0 and disk.free_bytes > (needed or 0):
        return (
            f"{disk} can hold no more files: all its inodes are used, although {bytes_text(disk.free_bytes)} are"
            " free; delete some files there, or choose an output folder on another disk"
        )
    if needed is None:
        return f"{disk} is full: {bytes_text(disk.free_bytes)} are free; {_ADVICE}"
    missing = max(needed - disk.free_bytes, 0)
    return (
        f"{disk} is full: {bytes_text(needed)} are needed, {bytes_text(disk.free_bytes)} are free,"
        f" {bytes_text(missing)} are missing; {_ADVICE}"
    )


def _over_quota(named: Path, needed: int | None, disk: Disk) -> str:
    amount = f": {bytes_text(needed)} are needed" if needed is not None else ""
    return f"the quota of user {_user()} on {disk} is used up{amount}; {_ADVICE}"


def _read_only(named: Path, needed: int | None, disk: Disk) -> str:
    return (
        f"{disk} is read-only: mount it writable again (a damaged disk is made read-only by the system, see `dmesg`),"
        " or choose an output folder on another disk"
    )


def _forbidden(named: Path, needed: int | None, disk: Disk) -> str:
    return f"user {_user()} may not write {named}: change its permissions, or choose another output folder"


def _vanished(named: Path, needed: int | None, disk: Disk) -> str:
    missing = _first_missing(named) or named
    return (
        f"{missing} does not exist: create it, or choose another output folder (if it was there before, it was deleted,"
        " renamed or unmounted)"
    )


def _not_a_folder(named: Path, needed: int | None, disk: Disk) -> str:
    file = next((part for part in (*reversed(named.parents), named) if os.path.isfile(part)), named)
    return f"{file} is a file, where a folder is needed: remove it, or choose another output folder"


def _unreachable(named: Path, needed: int | None, disk: Disk) -> str:
    return f"{disk} cannot be reached any more: mount it again, or choose an output folder on another disk"


def _damaged(named: Path, needed: int | None, disk: Disk) -> str:
    return f"{disk} reports an input/output error: see `dmesg`, and choose an output folder on another disk"


def _name_too_long(named: Path, needed: int | None, disk: Disk) -> str:
    return f"'{named.name}' is longer than names can be on {disk}: choose a shorter name"


def _too_large(named: Path, needed: int | None, disk: Disk) -> str:
    amount = f" of {bytes_text(needed)}" if needed is not None else ""
    return f"a file{amount} is larger than {disk} or `ulimit -f` allows: raise the limit, or choose another folder"


def _too_many_open(named: Path, needed: int | None, disk: Disk) -> str:
    return "too many files are open: raise the limit (`ulimit -n`, or fs.file-max for the whole machine)"


_SENTENCES = {
    errno.ENOSPC: _full,
    errno.EDQUOT: _over_quota,
    errno.EROFS: _read_only,
    errno.EACCES: _forbidden,
    errno.EPERM: _forbidden,
    errno.ENOENT: _vanished,
    errno.ENOTDIR: _not_a_folder,
    errno.EIO: _damaged,
    errno.ENAMETOOLONG: _name_too_long,
    errno.EFBIG: _too_large,
    errno.EMFILE: _too_many_open,
    errno.ENFILE: _too_many_open,
    **dict.fromkeys(_UNREACHABLE, _unreachable),
}


def _first_missing(path: Path) -> Path | None:
    """Returns the first folder of the path that does not exist, or the path itself; None if all exist."""
    return next((part for part in (*reversed(path.parents), path) if not os.path.exists(part)), None)


def _existing_folder(path: Path) -> Path:
    """Returns the path itself, or the nearest of its folders that exists, without symbolic links."""
    folder = path
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder.resolve()


def _mount_of(folder: Path) -> tuple[str, str]:
    """Returns where the file system of this absolute path is mounted, and its kind, such as `ext4`; the kind is empty
    where the system does not list what is mounted."""
    mount_point, kind = "", ""
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text(errors="surrogateescape").splitlines():
            _, escaped, listed_kind, *_ = line.split(" ")
            listed = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), escaped)  # `\040` is a space
            # Of several that are mounted at one point, the last one is seen.
            if folder.is_relative_to(listed) and len(listed) >= len(mount_point):
                mount_point, kind = listed, listed_kind
    if mount_point:
        return mount_point, kind
    while not os.path.ismount(folder):
        folder = folder.parent
    return str(folder), ""


def _user() -> str:
    try:
        import pwd

        return pwd.getpwuid(os.geteuid()).pw_name
    except (ImportError, KeyError):
        return str(os.geteuid())
