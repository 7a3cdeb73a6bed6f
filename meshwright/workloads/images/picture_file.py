"""Reads a picture or a mask of class numbers from its file, and reports files that cannot be decoded."""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from meshwright.errors import InputError
from meshwright.workloads.images.picture_cache import load_or_decode

POLICIES = ("fatal", "skip")
DRAFT = 2  # a JPEG is decoded at 1/2, 1/4 or 1/8 of its size if that is at least this many times the final size


@dataclass(frozen=True)
class ReadingOptions:
    """How picture files are read. A picture whose shorter side is larger than `shorter_side` is reduced to it; None
    reads pictures at full size. `cache` is a folder for the decoded and reduced pictures; None means no cache. The
    pixels do not depend on the cache."""

    shorter_side: int | None = None
    cache: str | None = None

    def __post_init__(self) -> None:
        if self.shorter_side is not None and self.shorter_side < 1:
            raise InputError(f"shorter_side is {self.shorter_side}: write a number of pixels, or null for no limit")
        if self.cache is not None and Path(self.cache).exists() and not Path(self.cache).is_dir():
            raise InputError(f"cache is {self.cache}, which is no folder: name one, or null to decode every time")


class UndecodableError(Exception):
    """Raised if a file does not hold a complete picture. The message has the path of the file and the decoder's
    message."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file}: cannot be decoded: {reason}")


class DamageReporter:
    """Reports damaged files by the job's policy: "fatal" raises an error, "skip" warns once for each file."""

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise InputError(f"damaged is {policy!r}: write {' or '.join(POLICIES)}")
        self.policy = policy
        self._reported: set[str] = set()

    def report(self, damage: UndecodableError) -> None:
        text = str(damage)
        if self.policy == "fatal":
            raise InputError(
                f"{text}: replace or remove it, or ignore such samples with --set data.damaged=skip"
            ) from None
        if text not in self._reported:
            self._reported.add(text)
            warnings.warn(f"{text}: loss and metrics ignore the sample", stacklevel=2)


def read_picture(file: str, reading: ReadingOptions) -> Image.Image:
    """Returns a picture in RGB. An alpha channel and the EXIF orientation are ignored, as in torchvision."""
    return _read(file, reading, "RGB", _decode_picture)


def read_mask(file: str, reading: ReadingOptions) -> Image.Image:
    """Returns a mask of class numbers as bytes, which the file holds as gray levels or as palette indices."""
    return _read(file, reading, "L", _decode_mask)


def _read(
    file: str, reading: ReadingOptions, mode: Literal["RGB", "L"], decode: Callable[[str, int | None], Image.Image]
) -> Image.Image:
    try:
        if reading.cache is None:
            return decode(file, reading.shorter_side)
        state = os.stat(file)
        key = (os.path.abspath(file), state.st_mtime_ns, state.st_size, reading.shorter_side, mode)
        return load_or_decode(Path(reading.cache), key, mode, partial(decode, file, reading.shorter_side))
    except (InputError, MemoryError):
        raise
    except Exception as error:  # decoders raise exceptions of many types for damaged files
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UndecodableError(file, reason) from None


def _decode_picture(file: str, shorter_side: int | None) -> Image.Image:
    with Image.open(file) as image:
        size = _reduced_size(image.size, shorter_side)
        if size == image.size:
            return image.convert("RGB")
        image.draft(None, (DRAFT * size[0], DRAFT * size[1]))
        return image.convert("RGB").resize(size, Image.Resampling.BILINEAR)


def _decode_mask(file: str, shorter_side: int | None) -> Image.Image:
    with Image.open(file) as image:
        if image.mode not in ("P", "L"):
            raise InputError(
                f"{file}: a mask holds class numbers, as a palette PNG of mode P or L, but this one's mode is"
                f" {image.mode}: put the data set's own file there"
            )
        numbers = Image.fromarray(np.asarray(image))  # palette indices, not colors
        size = _reduced_size(numbers.size, shorter_side)
        return numbers if size == numbers.size else numbers.resize(size, Image.Resampling.NEAREST)


def _reduced_size(size: tuple[int, int], shorter_side: int | None) -> tuple[int, int]:
    """Returns the size with the same proportions whose shorter side is at most `shorter_side`; the same size if that is
    None."""
    width, height = size
    shorter = min(width, height)
    if shorter_side is None or shorter <= shorter_side:
        return size
    return round(width * shorter_side / shorter), round(height * shorter_side / shorter)
