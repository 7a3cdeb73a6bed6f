"""`CheckpointFiles`: the files of a checkpoint, each of which is opened once and then compared with the manifest, so
that what is read is what was verified even if another checkpoint gets the same name meanwhile."""

import hashlib
import os
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Self

from meshwright.checkpoint.manifest import MANIFEST, Manifest
from meshwright.errors import CheckpointError
from meshwright.files.regular_file import open_regular_file


class CheckpointFiles:
    """The files that a manifest lists, in the folder `folder`. No other file is opened."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.names = tuple(manifest.files)
        self._checksums = manifest.files
        self._opened: dict[str, BufferedReader] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for file in self._opened.values():
            file.close()
        self._opened.clear()

    def bytes_of(self, name: str) -> int:
        """The size of a file according to the manifest; -1 if the manifest does not have it."""
        return self._checksums[name].bytes if name in self._checksums else -1

    def open(self, name: str) -> BufferedReader:
        """Returns the opened file, after comparing its size and checksum with the manifest when it is opened for the
        first time. It stays open. Raises a `CheckpointError` if it differs or cannot be read."""
        if name not in self._opened:
            self._opened[name] = self._open_verified(name)
        return self._opened[name]

    def read(self, name: str) -> bytes:
        """Returns the contents of a small file."""
        file = self.open(name)
        file.seek(0)
        return file.read()

    def verify(self) -> None:
        """Raises a `CheckpointError` that names the first file that is missing or differs from the manifest."""
        for name in self.names:
            if name not in self._opened:
                self._open_verified(name).close()

    def _open_verified(self, name: str) -> BufferedReader:
        if name not in self._checksums:  # then it has no checksum
            raise CheckpointError(f"{self.folder}: its {MANIFEST} does not have {name:.100}")
        try:
            file = open_regular_file(self.folder / name)
        except FileNotFoundError:
            raise CheckpointError(f"{self.folder}: {name} is missing") from None
        except OSError as error:
            raise CheckpointError(f"{self.folder}: {name} cannot be read: {error.strerror}") from None
        try:
            self._compare(name, file)
        except BaseException:
            file.close()
            raise
        return file

    def _compare(self, name: str, file: BufferedReader) -> None:
        """Raises a `CheckpointError` if a file has not the size and the checksum that the manifest says."""
        expected, size = self._checksums[name], os.fstat(file.fileno()).st_size
        if size != expected.bytes:
            raise CheckpointError(f"{self.folder}: {name} has {size} bytes, its manifest says {expected.bytes}")
        try:
            digest = hashlib.file_digest(file, "sha256")
        except OSError as error:
            raise CheckpointError(f"{self.folder}: {name} cannot be read: {error.strerror}") from None
        if digest.hexdigest() != expected.sha256:
            raise CheckpointError(f"{self.folder}: {name} does not have the checksum that its manifest says")
