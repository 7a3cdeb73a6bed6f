"""Data sets of pictures with a class each: generated ones, or those of a folder in ImageNet's layout."""

from colorsys import hsv_to_rgb
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils.data import Dataset

from meshwright.errors import InputError
from meshwright.zoo.generated import GeneratedSamples

SAMPLES = 1_000


def pictures(
    split: str = "train",
    size: int = 224,
    classes: int = 1000,
    channels: int = 3,
    root: str | None = None,
    synthetic: bool = False,
    damaged: str = "fatal",
    samples: int = SAMPLES,
    seed: int = 0,
    as_dict: bool = False,
) -> Dataset[Any]:
    """Returns a data set of (picture, class): normalized floats (channels, size, size), and a number below `classes`.
    With `as_dict`, samples are {pixel_values, labels}, the arguments of image classifiers of transformers.

    The pictures are those of `root`, a folder with train/<class>/*.JPEG and val/<class>/*.JPEG. With `synthetic` they
    are generated, and `samples` is their number.
    """
    if size < 1 or classes < 1 or channels < 1:
        raise InputError(f"size is {size}, classes is {classes} and channels is {channels}: each must be at least 1")
    dataset: Dataset[Any]
    if synthetic:
        dataset = GeneratedPictures(split, size, classes, channels, samples, seed)
    elif channels != 3:
        raise InputError(f"channels is {channels}: pictures in files are read with 3, so name your own data set")
    else:
        from meshwright.workloads.images.image_folder import image_folder  # needs pillow

        dataset = image_folder(split, root, False, damaged, size, classes)
    return PicturesAsDicts(dataset) if as_dict else dataset


class GeneratedPictures(GeneratedSamples):
    """Pictures of noise around one color, which depends on the class."""

    def __init__(self, split: str, size: int, classes: int, channels: int, samples: int, seed: int) -> None:
        super().__init__(split, samples, seed)
        self.size, self.classes, self.channels = size, classes, channels

    def make(self, index: int, generator: Generator) -> tuple[Tensor, Tensor]:
        label = torch.randint(self.classes, (), generator=generator)
        color = torch.tensor(hsv_to_rgb(label.item() / self.classes, 1.0, 1.0), dtype=torch.float32)
        mean = 2 * color[torch.arange(self.channels) % 3].view(-1, 1, 1) - 1
        shape = (self.channels, self.size, self.size)
        return mean + torch.randn(shape, generator=generator, dtype=torch.float32) / 2, label


class PicturesAsDicts(Dataset[dict[str, Any]]):
    """{pixel_values, labels} of a data set of (picture, class)."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        picture, label = self.samples[index]
        return {"pixel_values": picture, "labels": label}
