"""Crops, resizes and mirrors pictures, at random for training and always the same for evaluation.

Random numbers come from `random.random()` only: the loader seeds that generator for each (seed, epoch, sample), and it
returns the same numbers in every version of Python.
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

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels, scaled to 0..1
RATIO = (3 / 4, 4 / 3)  # smallest and largest width / height of a random crop
TRIES = 10  # attempts to draw a crop that fits into the picture
EVAL_SHARE = 224 / 256  # the side of a centre crop as a share of the picture's shorter side

_MEAN = torch.tensor(MEAN).mul(255).reshape(3, 1, 1)
_SCALE = torch.tensor(STD).mul(255).reciprocal().reshape(3, 1, 1)


def normalize(picture: Image.Image) -> Tensor:
    """Returns a picture as floats (3, height, width), normalized by ImageNet's mean and standard deviation."""
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()
    return pixels.to(torch.float32).sub_(_MEAN).mul_(_SCALE)


# ---- pictures for classification


def random_resized_crop(picture: Image.Image, size: int, scale: tuple[float, float]) -> Image.Image:
    """Returns a random part of the picture, resized to a square and mirrored half of the time. `scale` is the smallest
    and the largest share of the picture's area that the part has."""
    crop = _crop_and_resize(picture, size, random_box(picture.size, scale))
    return _mirror(crop) if random.random() < 0.5 else crop


def center_crop(picture: Image.Image, size: int) -> Image.Image:
    """Returns the square in the middle of the picture. The result is that of reducing the shorter side to `size` /
    `EVAL_SHARE` and then cropping to `size`, but in one resampling."""
    width, height = picture.size
    side = min(width, height) * EVAL_SHARE
    left, top = (width - side) / 2, (height - side) / 2
    return _crop_and_resize(picture, size, (left, top, left + side, top + side))


def random_box(size: Size, scale: tuple[float, float]) -> Box:
    """Draws a crop like torchvision's RandomResizedCrop: random area and aspect ratio. If `TRIES` draws do not fit into
    the picture, returns a crop in the middle."""
    width, height = size
    for _ in range(TRIES):
        area = width * height * _random_float(*scale)
        ratio = math.exp(_random_float(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = _random_integer(width - w), _random_integer(height - h)
            return left, top, left + w, top + h
    w = min(width, round(height * RATIO[1]))
    h = min(height, round(width / RATIO[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


# ---- pictures and masks for segmentation


@dataclass(frozen=True)
class View:
    """How a picture is placed in a square: its part `box` is resized to `shape`, mirrored if `mirrored`, and put into
    the square with its left top corner at `corner`."""

    box: Box
    shape: Size
    corner: Size
    mirrored: bool = False


def random_view(size: Size, side: int, scale: tuple[float, float]) -> View:
    """Draws a view that resizes the picture by a random factor, from `scale[0]` to `scale[1]`. If the resized picture
    is larger than the square, a random part of it is shown; if it is smaller, it is put at a random position."""
    factor = _random_float(*scale)
    (left, right, w, x), (top, bottom, h, y) = (_random_span(length, side, factor) for length in size)
    return View((left, top, right, bottom), (w, h), (x, y), mirrored=random.random() < 0.5)


def whole_view(size: Size, side: int) -> View:
    """Returns the view that shows the whole picture in the middle of a square. Only a picture larger than the square is
    resized."""
    factor = min(1.0, side / max(size))
    w, h = (max(1, round(length * factor)) for length in size)
    return View((0, 0, *size), (w, h), ((side - w) // 2, (side - h) // 2))


def apply_view(picture: Image.Image, mask: Image.Image, view: View, side: int, outside: int) -> tuple[Tensor, Tensor]:
    """Returns picture and mask in the same view: normalized floats (3, side, side) and class numbers (side, side).
    Pixels outside the picture have the mean color (0 after normalization) and the class `outside`."""
    colors = picture.resize(view.shape, Image.Resampling.BILINEAR, box=view.box)
    classes = mask.resize(view.shape, Image.Resampling.NEAREST, box=view.box)
    if view.mirrored:
        colors, classes = _mirror(colors), _mirror(classes)
    (w, h), (x, y) = view.shape, view.corner
    image = torch.zeros(3, side, side)
    image[:, y : y + h, x : x + w] = normalize(colors)
    target = torch.full((side, side), outside, dtype=torch.int64)
    target[y : y + h, x : x + w] = torch.from_numpy(np.array(classes))
    return image, target


def _random_span(length: int, side: int, factor: float) -> tuple[float, float, int, int]:
    """Draws one dimension of a view: begin and end in the picture, the number of pixels after resizing, and their
    first position in the square."""
    scaled = max(1, round(length * factor))
    if scaled <= side:
        return 0, length, scaled, _random_integer(side - scaled)
    start, pixel_length = _random_integer(scaled - side), length / scaled
    return start * pixel_length, min(length, (start + side) * pixel_length), side, 0


def _crop_and_resize(picture: Image.Image, size: int, box: Box) -> Image.Image:
    return picture.resize((size, size), Image.Resampling.BILINEAR, box=box)


def _mirror(picture: Image.Image) -> Image.Image:
    return picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def _random_float(low: float, high: float) -> float:
    return low + (high - low) * random.random()


def _random_integer(largest: int) -> int:
    """Draws a whole number from 0 to `largest`, both included."""
    return int(random.random() * (largest + 1))
