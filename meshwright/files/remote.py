"""Folders in object stores and on other machines, named by fsspec URLs such as s3://bucket/folder. fsspec is imported
only when such a URL is used. Credentials come from where the store's library looks for them, such as environment
variables; a URL that contains some is refused."""

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from meshwright.errors import InputError, MeshwrightError, RemoteStorageError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_BLOCK_BYTES = 8 * 2**20
_LONGEST_REASON = 300  # characters of an error of the store that are shown


def is_url(path: str) -> bool:
    """Whether a path in a job or on the command line is a URL."""
    return _URL.match(path) is not None


def check_url(url: str) -> str:
    """Returns the URL without slashes at its end. Raises a ValueError if it is not the URL of a folder. The error does
    not show a URL that may contain a password."""
    if not is_url(url):
        raise ValueError(f"'{url}' is not a URL: write one such as s3://bucket/folder or file:///folder")
    protocol, _, rest = url.partition("://")
    host = rest.partition("/")[0]
    if "@" in host or re.search(r":(?!\d*$)", host) or re.match(r"[^/@]*:[^@]*@", rest):
        raise ValueError(
            "the URL has a user or password before its host, which is not allowed, as it would be stored and printed: "
            "leave it out, and set the environment variables of the store, such as AWS_ACCESS_KEY_ID"
        )
    if "?" in url or "#" in url or "::" in url:
        raise ValueError("the URL contains '?', '#' or '::': write the plain URL of a folder, s3://bucket/folder")
    names = rest.split("/")
    if ".." in names or "." in names[1:]:
        raise ValueError(f"{url}: write the URL without '.' and '..'")
    if any(ord(character) < 32 for character in url):
        raise ValueError("the URL contains control characters")
    stripped = rest.rstrip("/")
    if not stripped:
        raise ValueError(f"{url} names no folder: write one such as {protocol}://bucket/folder")
    return f"{protocol.lower()}://{stripped}"


@dataclass(frozen=True)
class RemoteFolder:
    """A folder of a store: `path` is its name in the file system `system` of fsspec. Methods raise a
    `RemoteStorageError` if the store does not answer or refuses."""

    url: str
    system: Any
    path: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def child(self, name: str) -> "RemoteFolder":
        """The folder of this name in this folder. It need not exist."""
        return RemoteFolder(f"{self.url}/{name}", self.system, f"{self.path}/{name}")

    def names(self) -> list[str]:
        """The names of the objects and folders in this folder; none if it does not exist."""
        with _errors_of(self.url, "list"):
            try:
                paths = self.system.ls(self.path, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        own = self.path.strip("/")
        return sorted({path.rstrip("/").rpartition("/")[2] for path in paths if path.strip("/") != own})

    def files(self) -> dict[str, tuple[int, str]]:
        """The files in this folder at any depth: the size, and a text that changes when the contents do, by their path
        in this folder."""
        with _errors_of(self.url, "list"):
            found = self.system.find(self.path, detail=True)
        own, versions = self.path.strip("/"), ("ETag", "etag", "md5Hash", "mtime", "created", "LastModified")
        return {
            path.strip("/").removeprefix(own).removeprefix("/"): (
                int(info["size"]),
                next((str(info[key]) for key in versions if info.get(key)), ""),
            )
            for path, info in sorted(found.items())
        }

    def size(self, name: str) -> int | None:
        """The number of bytes of an object; None if it does not exist."""
        with _errors_of(f"{self.url}/{name}", "read"):
            try:
                info = self.system.info(f"{self.path}/{name}")
            except FileNotFoundError:
                return None
            return int(info["size"]) if info.get("type") == "file" and info.get("size") is not None else None

    def read(self, name: str, most_bytes: int) -> bytes | None:
        """The contents of a small object; None if it does not exist. Of one that is larger than `most_bytes`, one byte
        more than that is returned."""
        with _errors_of(f"{self.url}/{name}", "read"):
            try:
                with self.system.open(f"{self.path}/{name}", "rb") as file:
                    return bytes(file.read(most_bytes + 1))
            except FileNotFoundError:
                return None

    def write(self, name: str, contents: bytes) -> None:
        """Writes a small object. Readers see all of it or what was there before."""
        target = f"{self.path}/{name}"
        with _errors_of(f"{self.url}/{name}", "write"):
            if _is_local(self.system):  # an object store puts an object at once, a file system does not
                draft = f"{self.path}/.{name}.new"
                self.system.makedirs(self.path, exist_ok=True)
                self.system.pipe_file(draft, contents)
                Path(draft).replace(target)
            else:
                self.system.pipe_file(target, contents)

    def upload(self, source: Path, name: str, progress: Callable[[int], None]) -> tuple[int, str]:
        """Writes an object with the contents of a file. Returns the number of bytes and the SHA-256 checksum of what
        was written. `progress` is called with the bytes of each block."""
        digest, size = hashlib.sha256(), 0
        with source.open("rb") as file, _errors_of(f"{self.url}/{name}", "write"):
            target = self.system.open(f"{self.path}/{name}", "wb")
            try:
                while block := file.read(_BLOCK_BYTES):
                    target.write(block)
                    digest.update(block)
                    size += len(block)
                    progress(len(block))
            except BaseException:
                with suppress(Exception):
                    target.discard()  # the parts of an object that were sent already
                    target.closed = True
                raise
            target.close()
        return size, digest.hexdigest()

    def download(self, name: str, target: Path, most_bytes: int) -> tuple[int, str] | None:
        """Writes an object to a new file. Returns the number of bytes and the SHA-256 checksum of what was read; None
        if the object does not exist. It stops after more than `most_bytes`."""
        url, digest, size = f"{self.url}/{name}", hashlib.sha256(), 0
        with _errors_of(url, "read"):
            try:
                source = self.system.open(f"{self.path}/{name}", "rb")
            except FileNotFoundError:
                return None
        with source, target.open("xb") as file:
            while size <= most_bytes:
                with _errors_of(url, "read"):
                    block = source.read(_BLOCK_BYTES)
                if not block:
                    break
                file.write(block)
                digest.update(block)
                size += len(block)
        return size, digest.hexdigest()

    def delete(self, name: str) -> None:
        """Deletes an object, if it exists."""
        with _errors_of(f"{self.url}/{name}", "delete"), suppress(FileNotFoundError):
            self.system.rm_file(f"{self.path}/{name}")

    def delete_all(self) -> None:
        """Deletes this folder with all objects in it, if it exists."""
        with _errors_of(self.url, "delete"), suppress(FileNotFoundError):
            self.system.rm(self.path, recursive=True)


def open_remote(url: str, field: str) -> RemoteFolder:
    """Returns the folder at a URL; nothing is read yet. Raises an `InputError`, which begins with the name of the field
    or option, if the URL is wrong or a package is missing."""
    try:
        url = check_url(url)
    except ValueError as error:
        raise InputError(f"{field}: {error}") from None
    protocol = urlsplit(url).scheme
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise InputError(f"{field}: {url} needs fsspec: pip install 'meshwright[remote]'") from None
    try:
        # Without a cache of listings: other processes write to the same folder.
        options = {"auto_mkdir": True} if protocol in ("file", "local") else {"use_listings_cache": False}
        system, path = url_to_fs(url, **options)
    except ImportError as error:
        raise InputError(
            f"{field}: {url} needs a package that is missing ({_first_line(error)}): s3:// needs pip install"
            " 'meshwright[remote]', gs:// gcsfs, hf:// huggingface_hub"
        ) from None
    except ValueError as error:
        raise InputError(f"{field}: {url}: {_first_line(error)}") from None
    except Exception as error:
        raise RemoteStorageError(f"{url} cannot be opened: {_first_line(error)}") from None
    return RemoteFolder(url, system, str(path).rstrip("/"))


def _is_local(system: Any) -> bool:
    return "file" in (system.protocol if isinstance(system.protocol, tuple | list) else (system.protocol,))


@contextmanager
def _errors_of(url: str, action: str) -> Iterator[None]:
    """Raises a `RemoteStorageError` in place of the exceptions of the store's library, of which there are many."""
    try:
        yield
    except MeshwrightError:
        raise
    except Exception as error:
        raise RemoteStorageError(f"{url}: cannot {action} it: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    """The kind of an error and the first line of its message, without what follows a '?' in a URL, which may be a
    signature."""
    text = next(iter(str(error).splitlines()), "")
    text = re.sub(r"\?\S+", "?…", text)[:_LONGEST_REASON]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
