"""PASCAL VOC 2012 for segmentation: pictures in JPEGImages, masks in SegmentationClass, and the names of each split in
ImageSets/Segmentation."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from meshwright.errors import InputError, did_you_mean
from meshwright.files.cache import cache_folder, fill_once
from meshwright.workloads.images.augment import View, apply_view, random_view, whole_view
from meshwright.workloads.images.picture_file import (
    DamageReporter,
    ReadingOptions,
    UndecodableError,
    read_mask,
    read_picture,
)
from meshwright.workloads.images.pictures_generated import VERSION, make_voc
from meshwright.workloads.vision import IGNORED

LISTS = Path("ImageSets") / "Segmentation"
VOC_FOLDERS = (".", "VOC2012", "VOCdevkit/VOC2012")  # folders within the root in which the data set is looked for
LAYOUT = "VOCdevkit/VOC2012 with JPEGImages, SegmentationClass and ImageSets/Segmentation"


class VOC(Dataset[tuple[Tensor, Tensor]]):
    """(image, mask) samples: normalized floats (3, size, size) and the class of each pixel (size, size). Losses and
    metrics ignore the class 255. It marks edges of objects, pixels outside the picture, and all pixels of a picture
    that cannot be decoded."""

    def __init__(
        self,
        pictures: Path,
        masks: Path,
        names: Sequence[str],
        classes: int,
        size: int,
        reading: ReadingOptions,
        damage_reporter: DamageReporter,
        scale: tuple[float, float] | None,
    ) -> None:
        self.pictures, self.masks = pictures, masks
        self.classes = classes
        self.size = size
        self.scale = scale  # None: whole pictures, for evaluation
        self._names = np.array(names, dtype=np.str_)
        self._reading = reading
        self._damage_reporter = damage_reporter

    def __len__(self) -> int:
        return len(self._names)

    def files(self, index: int) -> tuple[str, str]:
        """Returns the paths of the picture and the mask of a sample."""
        name = str(self._names[index])
        return str(self.pictures / f"{name}.jpg"), str(self.masks / f"{name}.png")

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        picture_file, mask_file = self.files(index)
        try:
            picture, mask = read_picture(picture_file, self._reading), read_mask(mask_file, self._reading)
        except UndecodableError as damage:
            self._damage_reporter.report(damage)
            picture, mask = Image.new("RGB", (self.size,) * 2), Image.new("L", (self.size,) * 2, IGNORED)
            return apply_view(picture, mask, whole_view(picture.size, self.size), self.size, IGNORED)
        self._check(picture, mask, picture_file, mask_file)
        return apply_view(picture, mask, self._view(picture), self.size, IGNORED)

    def _view(self, picture: Image.Image) -> View:
        if self.scale is None:
            return whole_view(picture.size, self.size)
        return random_view(picture.size, self.size, self.scale)

    def _check(self, picture: Image.Image, mask: Image.Image, picture_file: str, mask_file: str) -> None:
        if picture.size != mask.size:
            raise InputError(
                f"{mask_file} is {_format_size(mask)}, but its picture {picture_file} is {_format_size(picture)}: put"
                " the mask of this picture there"
            )
        # In uint8, 255 + 1 is 0, so the ignored class 255 never is the largest.
        largest = int((np.asarray(mask) + np.uint8(1)).max()) - 1
        if largest >= self.classes:
            raise InputError(
                f"{mask_file} holds class {largest}, but classes is {self.classes}: set data.train.classes,"
                " data.eval.classes and model.classes"
            )


def voc(
    split: str = "train",
    root: str | None = None,
    synthetic: bool = False,
    damaged: str = "fatal",
    size: int = 480,
    classes: int = 21,
    scale: Sequence[float] = (0.5, 2.0),
    augment: bool | None = None,
    shorter_side: int | None = None,
    cache: str | None = None,
    masks: str = "SegmentationClass",
    samples: int = 160,
) -> VOC:
    """Returns the data set of one of the lists (train, val, trainval). `classes` includes the background.

    With `augment`, picture and mask are resized by a random factor from `scale[0]` to `scale[1]`, cropped at random and
    mirrored half of the time. Without `augment`, a sample is the whole picture, reduced if it is larger than `size`. If
    `augment` is None, the lists whose name begins with "train" are augmented. `ReadingOptions` explains `shorter_side`
    and `cache`. `masks` is the name of the folder of masks. With `synthetic`, `samples` pictures and masks for
    training, and an eighth as many for evaluation, are generated as files in this layout and then read.
    """
    if size < 1 or not 2 <= classes <= IGNORED:
        raise InputError(
            f"size is {size} and classes is {classes}: write a size of at least 1 pixel, and 2 to {IGNORED} classes"
        )
    if synthetic:
        root = str(_generate(classes, samples))
    if root is None:
        raise InputError(
            f"voc has no data: give {LAYOUT} with --set data.root=FOLDER, or generate small data with"
            " --set data.synthetic=true"
        )
    voc_folder = _find_voc_folder(Path(root))
    pictures, mask_folder = voc_folder / "JPEGImages", voc_folder / masks
    for folder in (pictures, mask_folder):
        if not folder.is_dir():
            raise InputError(f"there is no folder {folder}: expected is {LAYOUT}")
    names = _read_list(voc_folder, split)
    _check_files(names, voc_folder / LISTS / f"{split}.txt", pictures, mask_folder)
    resize_scale = _checked_scale(scale) if (split.startswith("train") if augment is None else augment) else None
    reading = ReadingOptions(shorter_side, cache)
    return VOC(pictures, mask_folder, names, classes, size, reading, DamageReporter(damaged), resize_scale)


def _generate(classes: int, samples: int) -> Path:
    if samples < 1:
        raise InputError(f"samples is {samples}: generate at least 1")
    folder = cache_folder() / "synthetic" / f"voc-{VERSION}-{classes}-classes-{samples}-samples"
    return fill_once(folder, partial(make_voc, classes=classes, samples=samples))


def _checked_scale(scale: Sequence[float]) -> tuple[float, float]:
    if len(scale) != 2 or not 0 < scale[0] <= scale[1]:
        raise InputError(f"scale is {list(scale)}: write the smallest and the largest factor, such as [0.5, 2.0]")
    return float(scale[0]), float(scale[1])


def _find_voc_folder(root: Path) -> Path:
    if not root.is_dir():
        raise InputError(f"data.root: there is no folder {root}: name one with {LAYOUT}")
    for name in VOC_FOLDERS:
        if (root / name / LISTS).is_dir():
            return root / name
    raise InputError(
        f"{root} has no folder {LISTS}, nor has {' or '.join(VOC_FOLDERS[1:])} in it: expected is {LAYOUT}"
    )


def _read_list(voc_folder: Path, split: str) -> list[str]:
    file = voc_folder / LISTS / f"{split}.txt"
    if not file.is_file():
        splits = [entry.stem for entry in (voc_folder / LISTS).glob("*.txt")]
        raise InputError(f"split is {split!r}, but there is no {file}{did_you_mean(split, splits)}")
    names = file.read_text().split()
    if not names:
        raise InputError(f"{file} lists no pictures: put the data set's own file there")
    return names


def _check_files(names: Sequence[str], listing: Path, pictures: Path, masks: Path) -> None:
    """Raises an error if a listed picture has no file or no mask, so that training does not find out after some steps.
    Each folder is listed once, which on network file systems is much faster than one lookup per file."""
    for folder, suffix in ((pictures, ".jpg"), (masks, ".png")):
        files = {entry.name for entry in folder.iterdir()}
        for name in names:
            if f"{name}{suffix}" not in files:
                raise InputError(
                    f"{listing} lists {name}, but there is no {folder / (name + suffix)}: add it, or remove the name"
                    " from the list"
                )


def _format_size(image: Image.Image) -> str:
    return f"{image.width} × {image.height}"
