"""Is a checkpoint whole? A manifest names every file with its size and checksum, and says what it is of."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from meshwright.errors import CheckpointError

MANIFEST = "manifest.json"


class File(BaseModel):
    model_config = ConfigDict(frozen=True)
    bytes: int
    sha256: str


class Manifest(BaseModel):
    """`about` is what the trainer wants to know before it loads: position, schedule, metrics, plan."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")  # a loss may be either
    step: int
    files: dict[str, File]
    about: dict[str, Any]


def describe(path: Path) -> File:
    with path.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256")
    return File(bytes=path.stat().st_size, sha256=digest.hexdigest())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    with (folder / MANIFEST).open("w") as opened:
        opened.write(manifest.model_dump_json(indent=1))
        opened.flush()
        os.fsync(opened.fileno())


def read_manifest(folder: Path) -> Manifest:
    try:
        return Manifest.model_validate_json((folder / MANIFEST).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder}: its {MANIFEST} cannot be read: {error}") from None
    except (ValidationError, json.JSONDecodeError):
        raise CheckpointError(f"{folder}: its {MANIFEST} is damaged") from None


def verify(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose every byte is there; otherwise an error that names the damage."""
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder}: {name} is missing")
        found = describe(path)
        if found.bytes != expected.bytes:
            raise CheckpointError(f"{folder}: {name} has {found.bytes} bytes, its manifest says {expected.bytes}")
        if found.sha256 != expected.sha256:
            raise CheckpointError(f"{folder}: {name} does not have the checksum that its manifest says")
    return manifest
