"""PASCAL VOC 2012's segmentation: JPEGImages, their masks in SegmentationClass, lists in ImageSets/Segmentation."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from meshwright.cache import cache_folder, made_once
from meshwright.errors import InputError, did_you_mean
from meshwright.workloads.images.augment import View, random_view, seen, whole_view
from meshwright.workloads.images.picture_file import Damages, Reading, Undecodable, read_mask, read_picture
from meshwright.workloads.images.pictures_generated import VERSION, make_voc
from meshwright.workloads.vision import IGNORED

LISTS = Path("ImageSets") / "Segmentation"
PLACES = (".", "VOC2012", "VOCdevkit/VOC2012")  # of those folders within the root
LAYOUT = "VOCdevkit/VOC2012 with JPEGImages, SegmentationClass and ImageSets/Segmentation"


class VOC(Dataset[tuple[Tensor, Tensor]]):
    """(image, mask): normalized floats (3, size, size) and each pixel's class (size, size). 255 counts for nothing:
    edges of objects, what lies beside a picture, and pictures that cannot be decoded."""

    def __init__(
        self,
        pictures: Path,
        masks: Path,
        names: Sequence[str],
        classes: int,
        size: int,
        reading: Reading,
        damages: Damages,
        scale: tuple[float, float] | None,
    ) -> None:
        self.pictures, self.masks = pictures, masks
        self.classes = classes
        self.size = size
        self.scale = scale  # null: whole pictures, for evaluation
        self._names = np.array(names, dtype=np.str_)
        self._reading = reading
        self._damages = damages

    def __len__(self) -> int:
        return len(self._names)

    def files(self, index: int) -> tuple[str, str]:
        name = str(self._names[index])
        return str(self.pictures / f"{name}.jpg"), str(self.masks / f"{name}.png")

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        picture_file, mask_file = self.files(index)
        try:
            picture, mask = read_picture(picture_file, self._reading), read_mask(mask_file, self._reading)
        except Undecodable as damage:
            self._damages.tell(damage)
            picture, mask = Image.new("RGB", (self.size,) * 2), Image.new("L", (self.size,) * 2, IGNORED)
            return seen(picture, mask, whole_view(picture.size, self.size), self.size, IGNORED)
        self._check(picture, mask, picture_file, mask_file)
        return seen(picture, mask, self._view(picture), self.size, IGNORED)

    def _view(self, picture: Image.Image) -> View:
        if self.scale is None:
            return whole_view(picture.size, self.size)
        return random_view(picture.size, self.size, self.scale)

    def _check(self, picture: Image.Image, mask: Image.Image, picture_file: str, mask_file: str) -> None:
        if picture.size != mask.size:
            raise InputError(
                f"{mask_file} is {_by(mask)}, but its picture {picture_file} is {_by(picture)}: they do not belong"
                " together"
            )
        # As bytes 255 + 1 is 0: what is ignored drops out without a mask of the mask.
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
    """`split` is one of the lists (train, val, trainval). `classes` counts the background. `augment` (null: for lists
    called train…): the picture and its mask enlarged or reduced by a factor of `scale`, a random part of both, mirrored
    half of the time; otherwise whole pictures, reduced where they are larger than `size`. `shorter_side`, `cache`: see
    `Reading`. `masks`: another folder of masks. With `synthetic`, `samples` pictures and masks are generated as files
    in this layout and then read."""
    if size < 1 or not 2 <= classes <= IGNORED:
        raise InputError(f"size is {size} and classes is {classes}: wanted are 1 pixel and 2 to {IGNORED} classes")
    if synthetic:
        root = str(_generated(classes, samples))
    if root is None:
        raise InputError(
            f"voc has no data: give {LAYOUT} with --set data.root=FOLDER, or generate small data with"
            " --set data.synthetic=true"
        )
    home = _home(Path(root))
    pictures, mask_folder = home / "JPEGImages", home / masks
    for folder in (pictures, mask_folder):
        if not folder.is_dir():
            raise InputError(f"there is no folder {folder}: wanted is {LAYOUT}")
    names = _listed(home, split)
    _check_files(names, home / LISTS / f"{split}.txt", pictures, mask_folder)
    chosen = _factors(scale) if (split.startswith("train") if augment is None else augment) else None
    reading = Reading(shorter_side, cache)
    return VOC(pictures, mask_folder, names, classes, size, reading, Damages(damaged), chosen)


def _generated(classes: int, samples: int) -> Path:
    if samples < 1:
        raise InputError(f"samples is {samples}: generate 1 at least")
    folder = cache_folder() / "synthetic" / f"voc-{VERSION}-{classes}-classes-{samples}-samples"
    return made_once(folder, partial(make_voc, classes=classes, samples=samples))


def _factors(scale: Sequence[float]) -> tuple[float, float]:
    if len(scale) != 2 or not 0 < scale[0] <= scale[1]:
        raise InputError(f"scale is {list(scale)}: write the smallest and the largest factor, such as [0.5, 2.0]")
    return float(scale[0]), float(scale[1])


def _home(root: Path) -> Path:
    if not root.is_dir():
        raise InputError(f"data.root: there is no folder {root}: name one with {LAYOUT}")
    for place in PLACES:
        if (root / place / LISTS).is_dir():
            return root / place
    raise InputError(f"{root} has no {LISTS}, nor have {' or '.join(PLACES[1:])} in it: wanted is {LAYOUT}")


def _listed(home: Path, split: str) -> list[str]:
    file = home / LISTS / f"{split}.txt"
    if not file.is_file():
        known = [entry.stem for entry in (home / LISTS).glob("*.txt")]
        raise InputError(f"split is {split!r}, but there is no {file}{did_you_mean(split, known)}")
    names = file.read_text().split()
    if not names:
        raise InputError(f"{file} lists no pictures: put the data set's own file there")
    return names


def _check_files(names: Sequence[str], listing: Path, pictures: Path, masks: Path) -> None:
    """Before the first step rather than at the step that comes to it. Folders are listed once: that is much faster
    than asking for every file where they lie on other machines."""
    for folder, suffix in ((pictures, ".jpg"), (masks, ".png")):
        there = {entry.name for entry in folder.iterdir()}
        for name in names:
            if f"{name}{suffix}" not in there:
                raise InputError(f"{listing} lists {name}, but there is no {folder / (name + suffix)}")


def _by(image: Image.Image) -> str:
    return f"{image.width} × {image.height}"
