"""A picture, or a mask of class numbers, from its file; and what becomes of a file that cannot be decoded."""

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
from meshwright.workloads.images.picture_cache import kept

POLICIES = ("fatal", "skip")
DRAFT = 2  # JPEG may be decoded at a half, a quarter or an eighth, but not below so many times the wanted side


@dataclass(frozen=True)
class Reading:
    """`shorter_side`: larger pictures are reduced to it, null leaves them as they are. `cache`: the folder in which
    decoded and reduced ones are kept; what is read does not depend on it."""

    shorter_side: int | None = None
    cache: str | None = None

    def __post_init__(self) -> None:
        if self.shorter_side is not None and self.shorter_side < 1:
            raise InputError(f"shorter_side is {self.shorter_side}: write a number of pixels, or null for no limit")
        if self.cache is not None and Path(self.cache).exists() and not Path(self.cache).is_dir():
            raise InputError(f"cache is {self.cache}, which is no folder: name one, or null to decode every time")


class Undecodable(Exception):
    """A file that holds no whole picture: where it lies and what the decoder said."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file}: cannot be decoded: {reason}")


class Damages:
    """Tells of damaged files as the job wants it: by ending the run, or once for each file."""

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise InputError(f"damaged is {policy!r}: write {' or '.join(POLICIES)}")
        self.policy = policy
        self._told: set[str] = set()

    def tell(self, damage: Undecodable) -> None:
        text = str(damage)
        if self.policy == "fatal":
            raise InputError(
                f"{text}: replace or remove it, or leave such samples out with --set data.damaged=skip"
            ) from None
        if text not in self._told:
            self._told.add(text)
            warnings.warn(f"{text}: the sample counts for nothing", stacklevel=2)


def read_picture(file: str, reading: Reading) -> Image.Image:
    """In RGB; whatever else its file holds (an alpha channel, its orientation) is left out, as torchvision does."""
    return _read(file, reading, "RGB", _picture)


def read_mask(file: str, reading: Reading) -> Image.Image:
    """Class numbers as bytes, which the file holds as shades of grey or as places in a palette."""
    return _read(file, reading, "L", _mask)


def _read(
    file: str, reading: Reading, mode: Literal["RGB", "L"], decode: Callable[[str, int | None], Image.Image]
) -> Image.Image:
    try:
        if reading.cache is None:
            return decode(file, reading.shorter_side)
        state = os.stat(file)
        key = (os.path.abspath(file), state.st_mtime_ns, state.st_size, reading.shorter_side, mode)
        return kept(Path(reading.cache), key, mode, partial(decode, file, reading.shorter_side))
    except (InputError, MemoryError):
        raise
    except Exception as error:  # decoders raise what they like when bytes make no sense
        reason = " ".join(str(error).split()) or type(error).__name__
        raise Undecodable(file, reason) from None


def _picture(file: str, shorter_side: int | None) -> Image.Image:
    with Image.open(file) as image:
        small = _reduced(image.size, shorter_side)
        if small == image.size:
            return image.convert("RGB")
        image.draft(None, (DRAFT * small[0], DRAFT * small[1]))
        return image.convert("RGB").resize(small, Image.Resampling.BILINEAR)


def _mask(file: str, shorter_side: int | None) -> Image.Image:
    with Image.open(file) as image:
        if image.mode not in ("P", "L"):
            raise InputError(
                f"{file}: a mask holds class numbers, as a palette PNG of mode P or L, but this one's mode is"
                f" {image.mode}: put the data set's own file there"
            )
        numbers = Image.fromarray(np.asarray(image))  # of a palette's picture: the places, not the colors
        small = _reduced(numbers.size, shorter_side)
        return numbers if small == numbers.size else numbers.resize(small, Image.Resampling.NEAREST)


def _reduced(size: tuple[int, int], shorter_side: int | None) -> tuple[int, int]:
    """The size whose shorter side is no more than `shorter_side`, in the same proportions."""
    width, height = size
    shorter = min(width, height)
    if shorter_side is None or shorter <= shorter_side:
        return size
    return round(width * shorter_side / shorter), round(height * shorter_side / shorter)
