"""Images or volumes and their masks, in two folders per split: `train/images` and `train/masks`, and the same for
`val`. An image and its mask have the same name; both may be PNG, `.npy` or NIfTI (.nii, .nii.gz)."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from meshwright.errors import InputError
from meshwright.workloads.segmentation.generated import generated_folder
from meshwright.workloads.segmentation.image_file import SUFFIXES, read_image, read_mask, stem_of

LAYOUT = "train/images, train/masks, val/images and val/masks"


def images_and_masks(
    split: str = "train",
    root: str | None = None,
    synthetic: bool = False,
    dimensions: int = 2,
    channels: int = 1,
    classes: int = 2,
    size: int | Sequence[int] = 256,
    augment: bool | None = None,
    samples: int = 64,
) -> "ImagesAndMasks":
    """Returns the data set of one split of the folder `root`. `dimensions` is 2 for images and 3 for volumes, `classes`
    includes the background, and `size` is that of the model's input: one number, or one for each dimension.

    With `augment`, a sample is a random part of the image, mirrored along each dimension half of the time. Without, it
    is the middle of the image. If `augment` is None, splits whose name begins with "train" are augmented. Images that
    are smaller than `size` are padded. With `synthetic`, `samples` images for training, and an eighth as many for
    evaluation, are generated as files in this layout and then read."""
    if dimensions not in (2, 3):
        raise InputError(f"dimensions is {dimensions}: write 2 for images, or 3 for volumes")
    if channels < 1 or classes < 2:
        raise InputError(f"channels is {channels} and classes is {classes}: write at least 1 channel and 2 classes")
    sizes = (size,) * dimensions if isinstance(size, int) else tuple(size)
    if len(sizes) != dimensions or any(length < 1 for length in sizes):
        raise InputError(f"size is {size}: write one number of at least 1, or {dimensions} of them")
    if synthetic:
        root = str(generated_folder(dimensions, channels, classes, samples))
    if root is None:
        raise InputError(
            f"images_and_masks has no data: give a folder with {LAYOUT} by --set data.root=FOLDER, or generate small"
            " data with --set data.synthetic=true"
        )
    is_augmented = split.startswith("train") if augment is None else augment
    return ImagesAndMasks(_pairs(Path(root) / split), channels, classes, sizes, is_augmented)


class ImagesAndMasks(Dataset[tuple[Tensor, Tensor]]):
    """(image, mask) samples: floats (channels, *sizes) whose channels have mean 0 and standard deviation 1 over the
    whole image, and the class number of each pixel or voxel (*sizes)."""

    def __init__(
        self, pairs: Sequence[tuple[Path, Path]], channels: int, classes: int, sizes: tuple[int, ...], augment: bool
    ) -> None:
        self.pairs = tuple(pairs)
        self.channels, self.classes = channels, classes
        self.sizes = sizes
        self.augment = augment

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image_file, mask_file = self.pairs[index]
        image = read_image(image_file, len(self.sizes), self.channels)
        mask = read_mask(mask_file, self.classes)
        if image.shape[1:] != mask.shape:
            raise InputError(
                f"{mask_file} has the size {mask.shape}, but its image {image_file} has {image.shape[1:]}: put the mask"
                " of this image there"
            )
        image, mask = self._part(_normalized(image), mask)
        return torch.from_numpy(np.ascontiguousarray(image)), torch.from_numpy(np.ascontiguousarray(mask))

    def _part(self, image: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cuts out or pads the same part of image and mask, one dimension after the other. Random numbers come from
        `random.random()` only, which the loader seeds for each epoch and sample."""
        for dim, size in enumerate(self.sizes):
            room = mask.shape[dim] - size
            begin = int(random.random() * (abs(room) + 1)) if self.augment else abs(room) // 2
            mirrored = self.augment and random.random() < 0.5
            if room < 0:
                image, mask = _padded(image, dim + 1, begin, -room - begin), _padded(mask, dim, begin, -room - begin)
            else:
                image, mask = _cut_out(image, dim + 1, begin, size), _cut_out(mask, dim, begin, size)
            if mirrored:
                image, mask = np.flip(image, dim + 1), np.flip(mask, dim)
        return image, mask


def _pairs(folder: Path) -> list[tuple[Path, Path]]:
    """The files of all images and their masks in a split, in the order of their names."""
    images, masks = (_files(folder / name) for name in ("images", "masks"))
    for stem, image in images.items():
        if stem not in masks:
            raise InputError(f"{image} has no mask: there is no {folder / 'masks' / stem} with {' or '.join(SUFFIXES)}")
    if not images:
        raise InputError(f"{folder / 'images'} has no images: put files with {' or '.join(SUFFIXES)} there")
    return [(image, masks[stem]) for stem, image in images.items()]


def _files(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}: expected is {LAYOUT}")
    files = {stem: file for file in sorted(folder.iterdir()) if (stem := stem_of(file))}
    if len(files) < sum(stem_of(file) is not None for file in folder.iterdir()):
        raise InputError(f"{folder} has files with equal names and different suffixes: keep one of them")
    return files


def _normalized(image: np.ndarray) -> np.ndarray:
    dims = tuple(range(1, image.ndim))
    mean, deviation = image.mean(dims, keepdims=True), image.std(dims, keepdims=True)
    return (image - mean) / np.maximum(deviation, np.float32(1e-6))


def _padded(array: np.ndarray, dim: int, before: int, after: int) -> np.ndarray:
    widths = [(0, 0)] * array.ndim
    widths[dim] = before, after
    return np.pad(array, widths)


def _cut_out(array: np.ndarray, dim: int, begin: int, size: int) -> np.ndarray:
    return array.take(range(begin, begin + size), dim)
