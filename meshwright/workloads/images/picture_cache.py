"""A folder of decoded pictures, one file each, filled when they are first asked for. It may be deleted at any time."""

import os
import tempfile
import warnings
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import PIL
from PIL import Image

SUFFIX = {"RGB": ".ppm", "L": ".pgm"}  # plain bytes behind a short header: nothing is faster to read or loses less


def kept(
    folder: Path, key: tuple[object, ...], mode: Literal["RGB", "L"], make: Callable[[], Image.Image]
) -> Image.Image:
    """The picture of `key`, which says all that it depends on: from the folder, or made and put there."""
    # Another Pillow may decode to other pixels.
    name = blake2b(repr((PIL.__version__, *key)).encode(), digest_size=16).hexdigest()
    file = folder / name[:2] / f"{name}{SUFFIX[mode]}"  # few enough in one folder for any file system
    try:
        with Image.open(file, formats=("PPM",)) as image:
            image.load()
            return image
    except (OSError, ValueError, SyntaxError):  # it is not there, or only a part of it
        pass
    made = make()
    try:
        _put(made, file)
    except OSError as error:
        warnings.warn(f"cache {folder}: a decoded picture cannot be kept: {error.strerror or error}", stacklevel=2)
    return made


def _put(image: Image.Image, file: Path) -> None:
    """Other processes see the whole file or none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=file.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as stream:
            image.save(stream, "PPM")
        os.replace(aside, file)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
