"""Pictures in one folder per class, ImageNet's layout: root/train/<class>/*.JPEG and root/val/<class>/*.JPEG."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from meshwright.errors import InputError, did_you_mean
from meshwright.files.cache import cache_folder, fill_once
from meshwright.workloads.images.augment import center_crop, normalize, random_resized_crop
from meshwright.workloads.images.picture_file import DamageReporter, ReadingOptions, UndecodableError, read_picture
from meshwright.workloads.images.pictures_generated import VERSION, make_image_folder

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # as in torchvision
IGNORED_LABEL = -100  # the label that torch's cross entropy ignores
LAYOUT = "a folder with train/<class>/*.JPEG and val/<class>/*.JPEG"
GENERATED_CLASSES = 10


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """(image, label) samples: normalized floats (3, size, size), and the index of the class among the sorted class
    folders."""

    def __init__(
        self,
        folder: Path,
        classes: Sequence[str],
        size: int,
        reading: ReadingOptions,
        damage_reporter: DamageReporter,
        scale: tuple[float, float] | None,
    ) -> None:
        self.folder = folder
        self.classes = tuple(classes)
        self.size = size
        self.scale = scale  # None: centre crops, for evaluation
        self._reading = reading
        self._damage_reporter = damage_reporter
        self._names, self._labels = _list_pictures(folder, classes)

    def __len__(self) -> int:
        return len(self._labels)

    @property
    def labels(self) -> np.ndarray:
        """The labels of all pictures, known without reading a picture."""
        return self._labels

    def file(self, index: int) -> str:
        return os.path.join(self.folder, os.fsdecode(self._names[index]))

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        try:
            picture = read_picture(self.file(index), self._reading)
        except UndecodableError as damage:
            self._damage_reporter.report(damage)
            return normalize(Image.new("RGB", (self.size, self.size))), IGNORED_LABEL
        if self.scale is None:
            return normalize(center_crop(picture, self.size)), int(self._labels[index])
        return normalize(random_resized_crop(picture, self.size, self.scale)), int(self._labels[index])


def image_folder(
    split: str = "train",
    root: str | None = None,
    synthetic: bool = False,
    damaged: str = "fatal",
    size: int = 224,
    classes: int | None = None,
    scale: Sequence[float] = (0.08, 1.0),
    augment: bool | None = None,
    shorter_side: int | None = None,
    cache: str | None = None,
    samples: int = 320,
) -> ImageFolder:
    """Returns the data set of the folder `split` within `root`. Class numbers are those of root/train in every split.

    `classes` is the number of classes that there must be; None accepts any number. With `augment`, a sample is a random
    part of its picture, mirrored half of the time; `scale` is the smallest and the largest share of the picture's area
    that the part has. Without `augment`, a sample is the centre of its picture. If `augment` is None, the splits whose
    name begins with "train" are augmented. `ReadingOptions` explains `shorter_side` and `cache`. With `synthetic`,
    about `samples` pictures are generated as files in this layout and then read.
    """
    if size < 1:
        raise InputError(f"size is {size}: write the side of the square in pixels, at least 1")
    if synthetic:
        root = str(_generate(classes or GENERATED_CLASSES, samples))
    if root is None:
        raise InputError(
            f"image_folder has no data: give {LAYOUT} with --set data.root=FOLDER, or generate small data with"
            " --set data.synthetic=true"
        )
    names = _class_names(Path(root), split)
    if classes is not None and len(names) != classes:
        raise InputError(
            f"{root} has {len(names)} class folders, but classes is {classes}: set data.train.classes,"
            f" data.eval.classes and model.classes to {len(names)}"
        )
    crop_scale = _checked_scale(scale) if (split.startswith("train") if augment is None else augment) else None
    reading = ReadingOptions(shorter_side, cache)
    return ImageFolder(Path(root) / split, names, size, reading, DamageReporter(damaged), crop_scale)


def _generate(classes: int, samples: int) -> Path:
    if classes < 2 or samples < 1:
        raise InputError(
            f"classes is {classes} and samples is {samples}: generated pictures need at least 2 classes and 1 sample"
        )
    folder = cache_folder() / "synthetic" / f"image_folder-{VERSION}-{classes}-classes-{samples}-samples"
    return fill_once(folder, partial(make_image_folder, classes=classes, samples=samples))


def _checked_scale(scale: Sequence[float]) -> tuple[float, float]:
    if len(scale) != 2 or not 0 < scale[0] <= scale[1] <= 1:
        raise InputError(
            f"scale is {list(scale)}: write the smallest and largest share of the area, such as [0.08, 1.0]"
        )
    return float(scale[0]), float(scale[1])


def _class_names(root: Path, split: str) -> list[str]:
    """Returns the class names of root/train if that exists, otherwise those of the split. If an evaluation split that
    lacks some class numbered its own folders, the numbers of the other classes would change."""
    if not root.is_dir():
        raise InputError(f"data.root: there is no folder {root}: name {LAYOUT}")
    if not (root / split).is_dir():
        raise InputError(f"{root} has no folder {split}; expected is {LAYOUT}{did_you_mean(split, _folders(root))}")
    split_names = _folders(root / split)
    if not split_names:
        raise InputError(f"{root / split} holds no class folders: expected is {LAYOUT}")
    names = _folders(root / "train") if (root / "train").is_dir() else split_names
    unknown = [name for name in split_names if name not in set(names)]
    if unknown:
        raise InputError(
            f"{root / split / unknown[0]}: {root / 'train'} has no such class, so it has no number: add the class"
            " folder there, or remove this one"
        )
    return names


def _folders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())


def _list_pictures(folder: Path, classes: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the path of every picture within `folder`, and its label, in torchvision's order.

    Both are arrays and not lists, because reading an element of a list changes its reference count: a forked worker
    would copy the memory of a million strings.
    """
    names: list[bytes] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        before = len(names)
        for subfolder, _, files in sorted(os.walk(folder / name, followlinks=True)):
            relative = os.path.relpath(subfolder, folder)
            names += [
                os.fsencode(os.path.join(relative, file)) for file in sorted(files) if file.lower().endswith(SUFFIXES)
            ]
        if len(names) == before and (folder / name).is_dir():
            raise InputError(
                f"{folder / name}: this class has no pictures ({', '.join(SUFFIXES)}): add some, or remove the folder"
            )
        labels += [label] * (len(names) - before)
    return np.array(names, dtype=np.bytes_), np.array(labels, dtype=np.int32)
