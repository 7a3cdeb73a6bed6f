"""The manifest of a checkpoint: the size and checksum of every file, with which damage is detected, and what the
trainer needs to know before it loads the checkpoint."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from meshwright.errors import CheckpointError

MANIFEST = "manifest.json"


class FileChecksum(BaseModel):
    """Size and checksum of one file."""

    model_config = ConfigDict(frozen=True)
    bytes: int
    sha256: str


class Manifest(BaseModel):
    """The contents of a checkpoint's manifest.json. `files` has every file but the manifest itself. `about` holds what
    the trainer needs to know before it loads, such as the position in the data, the seed, the plan and the last
    metrics."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")  # a loss may be inf or nan
    step: int
    files: dict[str, FileChecksum]
    about: dict[str, Any]


def file_checksum(path: Path) -> FileChecksum:
    """Computes the size and checksum of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return FileChecksum(bytes=path.stat().st_size, sha256=digest.hexdigest())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    with (folder / MANIFEST).open("w") as file:
        file.write(manifest.model_dump_json(indent=1))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    try:
        return Manifest.model_validate_json((folder / MANIFEST).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder}: its {MANIFEST} cannot be read: {error}") from None
    except (ValidationError, json.JSONDecodeError):
        raise CheckpointError(f"{folder}: its {MANIFEST} is damaged") from None


def verify(folder: Path) -> Manifest:
    """Returns the manifest of a checkpoint after checking every file. Raises a `CheckpointError` that names the
    damage."""
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder}: {name} is missing")
        actual = file_checksum(path)
        if actual.bytes != expected.bytes:
            raise CheckpointError(f"{folder}: {name} has {actual.bytes} bytes, its manifest says {expected.bytes}")
        if actual.sha256 != expected.sha256:
            raise CheckpointError(f"{folder}: {name} does not have the checksum that its manifest says")
    return manifest
