"""Which part of a picture is seen, at which size, mirrored or not: at random for training, in full for evaluation.

Random choices are drawn with `random.random()` alone: the loader seeds that generator for each (seed, epoch, sample),
and its numbers are the same under every Python.
"""

import math
import random
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

Size = tuple[int, int]  # width, height
Box = tuple[float, float, float, float]  # left, top, right, bottom

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels, from 0 to 1
RATIO = (3 / 4, 4 / 3)  # of a random crop's width to its height
TRIES = 10  # to find a crop that lies within the picture
EVAL_SHARE = 224 / 256  # of the shorter side that a centre crop shows

_MEAN = torch.tensor(MEAN).mul(255).reshape(3, 1, 1)
_SCALE = torch.tensor(STD).mul(255).reciprocal().reshape(3, 1, 1)


def normalized(picture: Image.Image) -> Tensor:
    """Floats (3, height, width) around 0."""
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()
    return pixels.to(torch.float32).sub_(_MEAN).mul_(_SCALE)


# ---- a whole picture of one label


def random_resized(picture: Image.Image, size: int, scale: tuple[float, float]) -> Image.Image:
    """A random part of the picture (`scale`: its share of the area) as a square, mirrored half of the time."""
    seen = _resized(picture, size, random_box(picture.size, scale))
    return _mirrored(seen) if random.random() < 0.5 else seen


def centred(picture: Image.Image, size: int) -> Image.Image:
    """The square in the middle: reducing the shorter side to `size` / `EVAL_SHARE` and cropping, in one."""
    width, height = picture.size
    side = min(width, height) * EVAL_SHARE
    left, top = (width - side) / 2, (height - side) / 2
    return _resized(picture, size, (left, top, left + side, top + side))


def random_box(size: Size, scale: tuple[float, float]) -> Box:
    """As torchvision's RandomResizedCrop: area and proportions by chance; the middle where none of ten would fit."""
    width, height = size
    for _ in range(TRIES):
        area = width * height * _between(*scale)
        ratio = math.exp(_between(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = _at_most(width - w), _at_most(height - h)
            return left, top, left + w, top + h
    w = min(width, round(height * RATIO[1]))
    h = min(height, round(width / RATIO[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


# ---- a picture with a mask


@dataclass(frozen=True)
class View:
    """`box` of the picture is seen with the size `shape`, at `corner` (left, top) of a square, mirrored or not."""

    box: Box
    shape: Size
    corner: Size
    mirrored: bool = False


def random_view(size: Size, side: int, scale: tuple[float, float]) -> View:
    """The picture enlarged or reduced by chance, and a part of it, or all of it, somewhere in a square."""
    factor = _between(*scale)
    (left, right, w, x), (top, bottom, h, y) = (_random_span(length, side, factor) for length in size)
    return View((left, top, right, bottom), (w, h), (x, y), mirrored=random.random() < 0.5)


def whole_view(size: Size, side: int) -> View:
    """All of the picture in the middle of a square: reduced where it is larger, as it is where it is not."""
    factor = min(1.0, side / max(size))
    w, h = (max(1, round(length * factor)) for length in size)
    return View((0, 0, *size), (w, h), ((side - w) // 2, (side - h) // 2))


def seen(picture: Image.Image, mask: Image.Image, view: View, side: int, outside: int) -> tuple[Tensor, Tensor]:
    """Normalized floats (3, side, side) and class numbers (side, side); beside the picture lie the mean color and the
    class `outside`. Both are cut alike."""
    colors = picture.resize(view.shape, Image.Resampling.BILINEAR, box=view.box)
    classes = mask.resize(view.shape, Image.Resampling.NEAREST, box=view.box)
    if view.mirrored:
        colors, classes = _mirrored(colors), _mirrored(classes)
    (w, h), (x, y) = view.shape, view.corner
    image = torch.zeros(3, side, side)
    image[:, y : y + h, x : x + w] = normalized(colors)
    target = torch.full((side, side), outside, dtype=torch.int64)
    target[y : y + h, x : x + w] = torch.from_numpy(np.array(classes))
    return image, target


def _random_span(length: int, side: int, factor: float) -> tuple[float, float, int, int]:
    """One dimension of a view: from where to where of the picture, how many pixels that becomes, and where they lie."""
    scaled = max(1, round(length * factor))
    if scaled <= side:
        return 0, length, scaled, _at_most(side - scaled)
    start, each = _at_most(scaled - side), length / scaled
    return start * each, min(length, (start + side) * each), side, 0


def _resized(picture: Image.Image, size: int, box: Box) -> Image.Image:
    return picture.resize((size, size), Image.Resampling.BILINEAR, box=box)


def _mirrored(picture: Image.Image) -> Image.Image:
    return picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def _between(low: float, high: float) -> float:
    return low + (high - low) * random.random()


def _at_most(largest: int) -> int:
    return int(random.random() * (largest + 1))
