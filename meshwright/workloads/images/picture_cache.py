"""A cache folder of decoded pictures, one file each, written when a picture is first read. It may be deleted at any
time."""

import os
import tempfile
import warnings
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import PIL
from PIL import Image

SUFFIX = {"RGB": ".ppm", "L": ".pgm"}  # uncompressed bytes after a short header: fastest to read, and without loss


def load_or_decode(
    folder: Path, key: tuple[object, ...], mode: Literal["RGB", "L"], decode: Callable[[], Image.Image]
) -> Image.Image:
    """Returns the picture that is stored in the folder under `key`. If there is none, decodes the picture and stores
    it. `key` must hold everything that the decoded picture depends on."""
    # Another version of Pillow may decode to other pixels.
    name = blake2b(repr((PIL.__version__, *key)).encode(), digest_size=16).hexdigest()
    file = folder / name[:2] / f"{name}{SUFFIX[mode]}"  # few enough in one folder for any file system
    try:
        with Image.open(file, formats=("PPM",)) as image:
            image.load()
            return image
    except (OSError, ValueError, SyntaxError):  # the file is missing or incomplete
        pass
    decoded = decode()
    try:
        _write(decoded, file)
    except OSError as error:
        warnings.warn(f"cache {folder}: a decoded picture cannot be written: {error.strerror or error}", stacklevel=2)
    return decoded


def _write(image: Image.Image, file: Path) -> None:
    """Writes the picture to a temporary file, and renames that when it is complete. Therefore other processes never
    read a part of a picture."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as stream:
            image.save(stream, "PPM")
        os.replace(temporary, file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
