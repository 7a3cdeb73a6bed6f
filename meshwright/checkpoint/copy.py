"""Copies of checkpoints in an object store. A copy is a folder `step-…` with the files of the checkpoint, small files
of its run, and last of all `copy.json`, which has the names, sizes and checksums of the others. A folder without
`copy.json` is no checkpoint: its upload was interrupted, or it is being deleted.

What happens when a process dies:

- Before `copy.json` is written, nothing reads the folder. The next upload of this step replaces its files.
- When a copy is replaced or deleted, `copy.json` is deleted first, so a half-deleted copy does not exist for readers.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from meshwright.checkpoint.manifest import (
    MANIFEST,
    FileChecksum,
    check_signed,
    checkpoint_name,
    file_checksum,
    read_manifest,
    signed_text,
    step_of,
)
from meshwright.errors import CheckpointError
from meshwright.files.remote import RemoteFolder
from meshwright.files.storage import require_space, writing

COPY = "copy.json"
_LARGEST_COPY_BYTES = 16 * 2**20
_LARGEST_RUN_FILE_BYTES = 2**30


class CopyManifest(BaseModel):
    """The contents of copy.json. `run` identifies the run, `files` has all other files of the copy."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Literal["copy"] = "copy"
    run: str = Field(pattern="^[0-9a-f]{32}$")
    step: NonNegativeInt
    files: dict[str, FileChecksum] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_are_plain(self) -> Self:
        for name in self.files:
            if not re.fullmatch(r"[\w.-]{1,100}", name, re.ASCII) or name in (".", "..", COPY):
                raise ValueError(f"{name!r:.50} is not the name of a file of a checkpoint")
        return self


def copied_steps(run: RemoteFolder) -> dict[int, RemoteFolder]:
    """The folders of a run's copies, by step and from the oldest to the newest, without those that have no copy.json.
    Whether a copy is damaged is not looked at."""
    return {step: folder for step, folder in step_folders(run).items() if folder.size(COPY) is not None}


def step_folders(run: RemoteFolder) -> dict[int, RemoteFolder]:
    """The folders of a run's copies, also of those that are not complete, by step and from the oldest to the newest."""
    steps = {step: run.child(name) for name in run.names() if (step := step_of(name)) is not None}
    return dict(sorted(steps.items()))


def is_copied(checkpoint: Path, copy: RemoteFolder) -> bool:
    """Whether a copy is one of this checkpoint, and not of another one of the same step."""
    try:
        copied = read_copy(copy).files.get(MANIFEST)
    except CheckpointError:
        return False
    return copied is not None and copied == file_checksum(checkpoint / MANIFEST)


def upload_checkpoint(
    checkpoint: Path,
    copy: RemoteFolder,
    run: str,
    run_files: Mapping[str, bytes],
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Uploads a checkpoint and small files of its run, and publishes the copy. Raises a `CheckpointError` if the
    checkpoint is damaged; then no copy exists."""
    manifest = read_manifest(checkpoint)
    copy.delete(COPY)
    files = {}
    for name in (*manifest.files, MANIFEST):
        size, digest = copy.upload(checkpoint / name, name, progress)
        files[name] = FileChecksum(bytes=size, sha256=digest)
        if name != MANIFEST and files[name] != manifest.files[name]:
            raise CheckpointError(f"{checkpoint}: {name} does not have the checksum that its manifest says")
    for name, contents in run_files.items():
        copy.write(name, contents)
        files[name] = _checksum_of(contents)
    copied = CopyManifest(run=run, step=manifest.step, files=files)
    copy.write(COPY, signed_text(copied.model_dump()).encode())


def delete_copy(copy: RemoteFolder) -> None:
    """Deletes a copy; from the first moment on it does not exist for readers."""
    copy.delete(COPY)
    copy.delete_all()


def read_copy(copy: RemoteFolder) -> CopyManifest:
    """Reads copy.json. Raises a `CheckpointError` if it is missing or damaged, or not signed although a key is set."""
    what = f"{copy.url}: its {COPY}"
    data = copy.read(COPY, _LARGEST_COPY_BYTES)
    if data is None:
        raise CheckpointError(f"{what} is missing")
    if len(data) > _LARGEST_COPY_BYTES:
        raise CheckpointError(f"{what} is damaged: it has more than {_LARGEST_COPY_BYTES:,} bytes")
    try:
        contents = json.loads(data)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{what} is damaged") from None
    if not isinstance(contents, dict):
        raise CheckpointError(f"{what} is damaged")
    try:
        manifest = CopyManifest.model_validate(check_signed(what, contents))
    except (ValidationError, RecursionError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else "it is nested too deeply"
        raise CheckpointError(f"{what} is damaged: {reason.removeprefix('Value error, ')}") from None
    if checkpoint_name(manifest.step) != copy.name:
        raise CheckpointError(f"{what} is of {checkpoint_name(manifest.step)}")
    return manifest


def read_run_file_of(copy: RemoteFolder, manifest: CopyManifest, name: str) -> bytes | None:
    """Returns a small file of the run, of which the copy has a version; None if it does not have one. Raises a
    `CheckpointError` if it is missing or damaged."""
    expected = manifest.files.get(name)
    if expected is None:
        return None
    contents = copy.read(name, min(expected.bytes, _LARGEST_RUN_FILE_BYTES))
    if contents is None:
        raise CheckpointError(f"{copy.url}: {name} is missing")
    _compare(copy, name, _checksum_of(contents), expected)
    return contents


def download_checkpoint(copy: RemoteFolder, manifest: CopyManifest, target: Path, other_files: frozenset[str]) -> None:
    """Downloads the checkpoint to the new folder `target`, without `other_files`, which are not parts of it. Raises a
    `CheckpointError` that names the first object that is missing or damaged, and a `StorageError` if there is no space
    for it."""
    names = [name for name in manifest.files if name not in other_files]
    for name in names:  # before anything is downloaded or space is asked for: the sizes may be wrong
        size, expected = copy.size(name), manifest.files[name].bytes
        if size is None:
            raise CheckpointError(f"{copy.url}: {name} is missing")
        if size != expected:
            raise CheckpointError(f"{copy.url}: {name} has {size} bytes, its {COPY} says {expected}")
    needed = sum(manifest.files[name].bytes for name in names)
    require_space(target.parent, needed)
    with writing(target, needed):
        target.mkdir()
        for name in names:
            result = copy.download(name, target / name, manifest.files[name].bytes)
            if result is None:
                raise CheckpointError(f"{copy.url}: {name} is missing")
            _compare(copy, name, FileChecksum(bytes=result[0], sha256=result[1]), manifest.files[name])


def _compare(copy: RemoteFolder, name: str, found: FileChecksum, expected: FileChecksum) -> None:
    if found != expected:
        raise CheckpointError(f"{copy.url}: {name} does not have the size and checksum that its {COPY} says")


def _checksum_of(contents: bytes) -> FileChecksum:
    return FileChecksum(bytes=len(contents), sha256=hashlib.sha256(contents).hexdigest())
