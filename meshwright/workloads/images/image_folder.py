"""Pictures in folders, one folder a class: ImageNet's layout, root/train/<class>/*.JPEG and root/val/<class>/*.JPEG."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from meshwright.cache import cache_folder, made_once
from meshwright.errors import InputError, did_you_mean
from meshwright.workloads.images.augment import centred, normalized, random_resized
from meshwright.workloads.images.picture_file import Damages, Reading, Undecodable, read_picture
from meshwright.workloads.images.pictures_generated import VERSION, make_image_folder

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # torchvision's
UNCOUNTED = -100  # the label that torch's cross entropy leaves out
LAYOUT = "a folder with train/<class>/*.JPEG and val/<class>/*.JPEG"
GENERATED_CLASSES = 10


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """(image, label): normalized floats (3, size, size), and the place of the class among the sorted folders."""

    def __init__(
        self,
        folder: Path,
        classes: Sequence[str],
        size: int,
        reading: Reading,
        damages: Damages,
        scale: tuple[float, float] | None,
    ) -> None:
        self.folder = folder
        self.classes = tuple(classes)
        self.size = size
        self.scale = scale  # null: the centre, for evaluation
        self._reading = reading
        self._damages = damages
        self._names, self._labels = _found(folder, classes)

    def __len__(self) -> int:
        return len(self._labels)

    @property
    def labels(self) -> np.ndarray:
        """Of all pictures, without reading any."""
        return self._labels

    def file(self, index: int) -> str:
        return os.path.join(self.folder, os.fsdecode(self._names[index]))

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        try:
            picture = read_picture(self.file(index), self._reading)
        except Undecodable as damage:
            self._damages.tell(damage)
            return normalized(Image.new("RGB", (self.size, self.size))), UNCOUNTED
        if self.scale is None:
            return normalized(centred(picture, self.size)), int(self._labels[index])
        return normalized(random_resized(picture, self.size, self.scale)), int(self._labels[index])


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
    """`split` is the folder within `root`; class numbers are those of root/train in every split. `classes`: how many
    there must be (null: as many as there are). `augment` (null: for splits called train…): a random part of each
    picture, of `scale` of its area, mirrored half of the time; otherwise the centre. `shorter_side`, `cache`: see
    `Reading`. With `synthetic`, about `samples` pictures are generated as files in this layout and then read."""
    if size < 1:
        raise InputError(f"size is {size}: write the pixels of a picture's side, from 1 on")
    if synthetic:
        root = str(_generated(classes or GENERATED_CLASSES, samples))
    if root is None:
        raise InputError(
            f"image_folder has no data: give {LAYOUT} with --set data.root=FOLDER, or generate small data with"
            " --set data.synthetic=true"
        )
    names = _class_names(Path(root), split)
    if classes is not None and len(names) != classes:
        raise InputError(
            f"{root} has {len(names)} class folders, but classes is {classes}: set data.train.classes,"
            " data.eval.classes and model.classes to what there is"
        )
    chosen = _shares(scale) if (split.startswith("train") if augment is None else augment) else None
    return ImageFolder(Path(root) / split, names, size, Reading(shorter_side, cache), Damages(damaged), chosen)


def _generated(classes: int, samples: int) -> Path:
    if classes < 2 or samples < 1:
        raise InputError(f"classes is {classes} and samples is {samples}: generated pictures need 2 and 1 at least")
    folder = cache_folder() / "synthetic" / f"image_folder-{VERSION}-{classes}-classes-{samples}-samples"
    return made_once(folder, partial(make_image_folder, classes=classes, samples=samples))


def _shares(scale: Sequence[float]) -> tuple[float, float]:
    if len(scale) != 2 or not 0 < scale[0] <= scale[1] <= 1:
        raise InputError(
            f"scale is {list(scale)}: write the smallest and largest share of the area, such as [0.08, 1.0]"
        )
    return float(scale[0]), float(scale[1])


def _class_names(root: Path, split: str) -> list[str]:
    """Those of root/train where there is one: without a class, an evaluation set's own would move the numbers."""
    if not root.is_dir():
        raise InputError(f"data.root: there is no folder {root}: name {LAYOUT}")
    if not (root / split).is_dir():
        raise InputError(f"{root} has no folder {split}; wanted is {LAYOUT}{did_you_mean(split, _folders(root))}")
    own = _folders(root / split)
    if not own:
        raise InputError(f"{root / split} holds no class folders: wanted is {LAYOUT}")
    names = _folders(root / "train") if (root / "train").is_dir() else own
    unknown = [name for name in own if name not in set(names)]
    if unknown:
        raise InputError(
            f"{root / split / unknown[0]}: {root / 'train'} has no such class, so it has no number: both need the same"
        )
    return names


def _folders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())


def _found(folder: Path, classes: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Every picture's path within `folder` and its label, in torchvision's order.

    As arrays: reading an object of a list writes to it, and a million of them would be copied into every worker.
    """
    names: list[bytes] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        before = len(names)
        for inside, _, files in sorted(os.walk(folder / name, followlinks=True)):
            within = os.path.relpath(inside, folder)
            names += [
                os.fsencode(os.path.join(within, file)) for file in sorted(files) if file.lower().endswith(SUFFIXES)
            ]
        if len(names) == before and (folder / name).is_dir():
            raise InputError(
                f"{folder / name}: this class has no pictures ({', '.join(SUFFIXES)}): add some, or remove the folder"
            )
        labels += [label] * (len(names) - before)
    return np.array(names, dtype=np.bytes_), np.array(labels, dtype=np.int32)
