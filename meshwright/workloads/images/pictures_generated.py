"""Writes small generated data sets in the file layouts of real ones, for tests and for machines without the data.

A model can learn them because each class has its own hue, which cropping, mirroring and JPEG preserve.
"""

from colorsys import hsv_to_rgb
from pathlib import Path

import numpy as np
from PIL import Image

from meshwright.data.order import derive_seed

VERSION = 1  # part of the names of cached folders: raise it when the generated pictures change
EDGE = 255  # the class number of the edges of objects in masks, which losses ignore
TRAIN_PER_EVAL = 8  # pictures for training per picture for evaluation
QUALITY = 92  # of JPEGs


def make_image_folder(folder: Path, classes: int, samples: int) -> None:
    """Writes train/ with `samples` pictures, and val/ with an eighth as many; each has at least one picture of each
    class."""
    digits = len(str(classes - 1))
    for split, count in (("train", samples), ("val", samples // TRAIN_PER_EVAL)):
        for number in range(max(classes, count)):
            label = number % classes
            class_folder = folder / split / f"class_{label:0{digits}}"
            class_folder.mkdir(parents=True, exist_ok=True)
            picture = _draw_picture(_random("image_folder", split, number), _color(label, classes))
            picture.save(class_folder / f"{split}_{number:06}.JPEG", "JPEG", quality=QUALITY)


def make_voc(folder: Path, classes: int, samples: int) -> None:
    """Writes VOCdevkit/VOC2012 with the lists train (`samples` pictures), val (an eighth as many) and trainval."""
    voc_folder = folder / "VOCdevkit" / "VOC2012"
    for subfolder in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (voc_folder / subfolder).mkdir(parents=True)
    names: dict[str, list[str]] = {"train": [], "val": []}
    for split, count in (("train", samples), ("val", max(1, samples // TRAIN_PER_EVAL))):
        for _ in range(count):
            number = len(names["train"]) + len(names["val"])
            name = f"2012_{number:06}"
            picture, mask = _draw_picture_and_mask(_random("voc", split, number), classes)
            picture.save(voc_folder / "JPEGImages" / f"{name}.jpg", "JPEG", quality=QUALITY)
            mask.save(voc_folder / "SegmentationClass" / f"{name}.png", "PNG")
            names[split].append(name)
    names["trainval"] = sorted(names["train"] + names["val"])
    lists = voc_folder / "ImageSets" / "Segmentation"
    for split, split_names in names.items():
        (lists / f"{split}.txt").write_text("".join(f"{name}\n" for name in split_names))


def _draw_picture(random: np.random.RandomState, color: np.ndarray) -> Image.Image:
    """Draws rectangles in several shades of a color, on a background of the same color."""
    height, width = random.randint(64, 97, 2)
    pixels = np.ones((height, width, 1)) * color * random.uniform(0.6, 0.8)
    for _ in range(4):
        rows, columns = _rectangle(random, height, width, smallest=1 / 8)
        pixels[rows, columns] = color * random.uniform(0.4, 1.0)
    return _add_noise(pixels, random)


def _draw_picture_and_mask(random: np.random.RandomState, classes: int) -> tuple[Image.Image, Image.Image]:
    """Draws two rectangles in the colors of their classes on gray, the second over the first. Their edges have the
    class `EDGE` in the mask."""
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
    return _add_noise(pixels, random), numbers


def _rectangle(random: np.random.RandomState, height: int, width: int, smallest: float) -> tuple[slice, slice]:
    """Draws the rows and columns of a rectangle. Its height and width are between the share `smallest` and half of the
    picture's."""
    spans = []
    for length in (height, width):
        extent = int(random.randint(int(length * smallest), length // 2 + 1))
        start = int(random.randint(0, length - extent + 1))
        spans.append(slice(start, start + extent))
    return spans[0], spans[1]


def _add_noise(pixels: np.ndarray, random: np.random.RandomState) -> Image.Image:
    noise = random.normal(0, 12, pixels.shape)
    return Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8))


def _color(label: int, labels: int) -> np.ndarray:
    """Returns the RGB color of a class; the hues of all classes are spread evenly over the color circle."""
    return 255 * np.array(hsv_to_rgb(label / labels, 0.9, 1.0))


def _random(*parts: int | str) -> np.random.RandomState:
    # NumPy promises that RandomState does not change: all versions generate the same files.
    return np.random.RandomState(derive_seed(0, "pictures", *parts) & 0xFFFFFFFF)


def _voc_palette() -> list[int]:
    """Returns VOC's colors: bit 7 - k of red, green and blue is bit 3k, 3k + 1 and 3k + 2 of the class number."""
    palette = []
    for label in range(256):
        for channel in range(3):
            bits = [(label >> (3 * k + channel)) & 1 for k in range(8)]
            palette.append(sum(bit << (7 - k) for k, bit in enumerate(bits)))
    return palette
