"""Writes small generated data sets for segmentation, in the layout of real ones: images as PNG, volumes as .nii.gz.

Each shows some ellipses or ellipsoids under noise, and the brightness of each tells its class.
"""

from functools import partial
from pathlib import Path

import numpy as np

from meshwright.data.order import derive_seed
from meshwright.errors import InputError
from meshwright.files.cache import cache_folder, fill_once
from meshwright.workloads.segmentation.nifti import write_nifti

VERSION = 1  # part of the names of cached folders: raise it when the generated files change
TRAIN_PER_EVAL = 8  # images for training per image for evaluation
SIDES = {2: (40, 56), 3: (20, 28)}  # smallest and largest side of an image, by its dimensions
OBJECTS = 3
BACKGROUND, BRIGHTEST, NOISE = 40, 220, 12  # gray levels


def generated_folder(dimensions: int, channels: int, classes: int, samples: int) -> Path:
    """Returns the folder of generated files, and writes them if they are not in the cache. Images in PNG have 1 or 3
    channels; with other numbers, and for volumes of several channels, the files are NumPy arrays."""
    if samples < 1:
        raise InputError(f"samples is {samples}: generate at least 1")
    name = f"masks-{VERSION}-{dimensions}d-{channels}-channels-{classes}-classes-{samples}-samples"
    write = partial(_write, dimensions=dimensions, channels=channels, classes=classes, samples=samples)
    return fill_once(cache_folder() / "synthetic" / name, write)


def _write(folder: Path, dimensions: int, channels: int, classes: int, samples: int) -> None:
    for split, count in (("train", samples), ("val", max(1, samples // TRAIN_PER_EVAL))):
        for kind in ("images", "masks"):
            (folder / split / kind).mkdir(parents=True)
        for number in range(count):
            # NumPy promises that RandomState does not change: all versions generate the same files.
            random = np.random.RandomState(derive_seed(0, "masks", dimensions, split, number) & 0xFFFFFFFF)
            image, mask = _draw(random, dimensions, channels, classes)
            for kind, array in (("images", image), ("masks", mask)):
                _write_array(folder / split / kind / f"{number:05}", array, dimensions)


def _draw(random: np.random.RandomState, dimensions: int, channels: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws an image (*sizes, channels) and its mask (*sizes), both of bytes."""
    sizes = tuple(random.randint(*SIDES[dimensions], dimensions))
    mask = np.zeros(sizes, np.uint8)
    positions = np.indices(sizes).T  # (*reversed sizes, dimensions)
    for _ in range(OBJECTS):
        center, radius = (random.uniform(low, high, dimensions) * sizes for low, high in ((0.2, 0.8), (0.1, 0.25)))
        distance = np.square((positions - center) / radius).sum(-1).T
        mask[distance < 1] = random.randint(1, classes)
    levels = BACKGROUND + (BRIGHTEST - BACKGROUND) * mask[..., None] / (classes - 1)
    image = levels + random.normal(0, NOISE, (*sizes, channels))
    return np.clip(image, 0, 255).astype(np.uint8), mask


def _write_array(stem: Path, array: np.ndarray, dimensions: int) -> None:
    single = array[..., 0] if array.ndim > dimensions and array.shape[-1] == 1 else array
    if dimensions == 3 and single.ndim == 3:
        write_nifti(stem.with_suffix(".nii.gz"), single)
    elif dimensions == 2 and (single.ndim == 2 or single.shape[-1] == 3):
        from PIL import Image

        Image.fromarray(single).save(stem.with_suffix(".png"))
    else:
        np.save(stem.with_suffix(".npy"), np.moveaxis(single, -1, 0))
