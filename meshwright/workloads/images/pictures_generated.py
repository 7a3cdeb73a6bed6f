"""Small data sets written as files in the layouts of real ones, for tests and for machines without the data.

The rule that can be learned: a class has a hue of its own, which survives cropping, mirroring and JPEG.
"""

from colorsys import hsv_to_rgb
from pathlib import Path

import numpy as np
from PIL import Image

from meshwright.data.order import derive

VERSION = 1  # of what is drawn: files that another one drew are not taken for these
EDGE = 255  # in masks: between an object and what is around it
EVAL_SHARE = 8  # one picture for evaluation to so many for training
QUALITY = 92  # of JPEGs


def make_image_folder(folder: Path, classes: int, samples: int) -> None:
    """train/ and val/, about `samples` and an eighth of it, one of each class at least."""
    digits = len(str(classes - 1))
    for split, count in (("train", samples), ("val", samples // EVAL_SHARE)):
        for number in range(max(classes, count)):
            label = number % classes
            inside = folder / split / f"class_{label:0{digits}}"
            inside.mkdir(parents=True, exist_ok=True)
            picture = _colored_things(_random("image_folder", split, number), _color(label, classes))
            picture.save(inside / f"{split}_{number:06}.JPEG", "JPEG", quality=QUALITY)


def make_voc(folder: Path, classes: int, samples: int) -> None:
    """VOCdevkit/VOC2012 with the lists train, val (an eighth of it) and trainval."""
    home = folder / "VOCdevkit" / "VOC2012"
    for inside in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (home / inside).mkdir(parents=True)
    names: dict[str, list[str]] = {"train": [], "val": []}
    for split, count in (("train", samples), ("val", max(1, samples // EVAL_SHARE))):
        for _ in range(count):
            number = len(names["train"]) + len(names["val"])
            name = f"2012_{number:06}"
            picture, mask = _scene(_random("voc", split, number), classes)
            picture.save(home / "JPEGImages" / f"{name}.jpg", "JPEG", quality=QUALITY)
            mask.save(home / "SegmentationClass" / f"{name}.png", "PNG")
            names[split].append(name)
    names["trainval"] = sorted(names["train"] + names["val"])
    for split, listed in names.items():
        (home / "ImageSets" / "Segmentation" / f"{split}.txt").write_text("".join(f"{name}\n" for name in listed))


def _colored_things(random: np.random.RandomState, color: np.ndarray) -> Image.Image:
    """Rectangles of a color, in several shades, on the same color."""
    height, width = random.randint(64, 97, 2)
    pixels = np.ones((height, width, 1)) * color * random.uniform(0.6, 0.8)
    for _ in range(4):
        rows, columns = _rectangle(random, height, width, smallest=1 / 8)
        pixels[rows, columns] = color * random.uniform(0.4, 1.0)
    return _noisy(pixels, random)


def _scene(random: np.random.RandomState, classes: int) -> tuple[Image.Image, Image.Image]:
    """Two rectangles in the colors of their classes on grey, one over the other, with edges that are ignored."""
    height, width = random.randint(80, 129, 2)
    pixels = np.full((height, width, 3), 90.0)
    mask = np.zeros((height, width), np.uint8)
    for _ in range(2):
        label = int(random.randint(1, classes))
        rows, columns = _rectangle(random, height, width, smallest=1 / 3)
        pixels[rows, columns] = _color(label - 1, classes - 1) * random.uniform(0.8, 1.0)
        mask[rows, columns] = EDGE
        mask[rows.start + 1 : rows.stop - 1, columns.start + 1 : columns.stop - 1] = label
    numbers = Image.fromarray(mask)
    numbers.putpalette(_voc_palette())
    return _noisy(pixels, random), numbers


def _rectangle(random: np.random.RandomState, height: int, width: int, smallest: float) -> tuple[slice, slice]:
    """Rows and columns, from the share `smallest` to half of the picture each way."""
    spans = []
    for length in (height, width):
        extent = int(random.randint(int(length * smallest), length // 2 + 1))
        start = int(random.randint(0, length - extent + 1))
        spans.append(slice(start, start + extent))
    return spans[0], spans[1]


def _noisy(pixels: np.ndarray, random: np.random.RandomState) -> Image.Image:
    noise = random.normal(0, 12, pixels.shape)
    return Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8))


def _color(label: int, labels: int) -> np.ndarray:
    """Hues all around the circle."""
    return 255 * np.array(hsv_to_rgb(label / labels, 0.9, 1.0))


def _random(*parts: int | str) -> np.random.RandomState:
    # This generator of numpy's is frozen: files made by another version are the same.
    return np.random.RandomState(derive(0, "pictures", *parts) & 0xFFFFFFFF)


def _voc_palette() -> list[int]:
    """VOC's colors: bit k of red, green and blue is bit 3k, 3k + 1 and 3k + 2 of the class number, highest first."""
    palette = []
    for label in range(256):
        for channel in range(3):
            bits = [(label >> (3 * place + channel)) & 1 for place in range(8)]
            palette.append(sum(bit << (7 - place) for place, bit in enumerate(bits)))
    return palette
