"""The default workload: a small convolutional network, and the MNIST digits that it learns to classify."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from meshwright.errors import InputError
from meshwright.workloads.idx import read_idx

SUBSET = Path(__file__).parent / "mnist_subset"
SPLITS = {"train": "train", "test": "t10k"}  # split → prefix of its file names
MEAN, STD = 0.1307, 0.3081  # over all training pixels, scaled to 0..1
SIDE = 28  # pixels


class Net(nn.Module):
    """Maps images (batch, 1, 28, 28) to class scores (batch, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv1(images).relu()
        x = nn.functional.max_pool2d(self.conv2(x), 2)
        x = self.fc1(x.flatten(1)).relu()
        return self.fc2(x)


class Digits(Dataset[tuple[Tensor, int]]):
    """(image, label) samples. Images are stored as bytes; a whole batch is converted to normalized floats at once."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images = torch.from_numpy(images.copy())
        self.labels: list[int] = labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        # Indexing with a list copies pixel by pixel; index_select copies whole images.
        raw_images = self.images.index_select(0, torch.tensor(indices))
        pixels = raw_images.unsqueeze(1).to(torch.float32)
        pixels.div_(255).sub_(MEAN).div_(STD)
        return list(zip(pixels.unbind(), [self.labels[index] for index in indices], strict=True))


def digits(
    split: str = "train", root: str | None = None, synthetic: bool = False, limit: int | None = None
) -> Dataset[tuple[Tensor, int]]:
    """Returns a data set of (image, label): normalized floats (1, 28, 28) and a class from 0 to 9.

    The digits are read from the folder `root`, in the layout that torchvision's MNIST writes. If `root` is None, they
    are the 12,000 digits that come with the package. With `synthetic`, they are generated instead. `limit` keeps only
    the first digits.
    """
    if split not in SPLITS:
        raise InputError(f"split is {split!r}: MNIST has {' and '.join(SPLITS)}")
    if limit is not None and limit < 1:
        raise InputError(f"limit is {limit}: write a number of digits of at least 1, or null for all")
    images, labels = _generate(split) if synthetic else _read(split, SUBSET if root is None else Path(root))
    return Digits(images[:limit], labels[:limit])


def _read(split: str, root: Path) -> tuple[np.ndarray, np.ndarray]:
    images_file = _find(root, f"{SPLITS[split]}-images-idx3-ubyte")
    labels_file = _find(root, f"{SPLITS[split]}-labels-idx1-ubyte")
    images, labels = read_idx(images_file), read_idx(labels_file)
    for file, array, expected, dims in (
        (images_file, images, f"images of {SIDE} × {SIDE} (magic number 0x00000803)", (SIDE, SIDE)),
        (labels_file, labels, "labels (magic number 0x00000801)", ()),
    ):
        if array.ndim == 0 or array.shape[1:] != dims:
            sizes = " × ".join(str(length) for length in array.shape)
            raise InputError(f"{file}: holds {sizes} values, not {expected}: put the original MNIST file there")
    if len(images) != len(labels):
        raise InputError(
            f"{images_file} has {len(images)} images, but {labels_file} has {len(labels)} labels: they do "
            "not belong to the same data set, download both again"
        )
    if len(labels) and labels.max() > 9:
        index = int(labels.argmax())
        raise InputError(f"{labels_file}: label {index} is {labels[index]}, outside 0..9: download it again")
    return images, labels


def _find(root: Path, name: str) -> Path:
    folders = [root / "MNIST" / "raw", root / "raw", root]
    for folder in folders:
        for file in (folder / name, folder / f"{name}.gz"):
            if file.is_file():
                return file
    searched = ", ".join(str(folder) for folder in folders)
    raise InputError(
        f"{root}: there is no {name} or {name}.gz in any of {searched}: set data.root to the folder of the "
        "four MNIST files, or to null for the digits that come with the package"
    )


# Rows and columns of each segment of a seven-segment display.
_SEGMENTS = {
    "a": (slice(5, 8), slice(9, 19)),
    "b": (slice(5, 15), slice(16, 19)),
    "c": (slice(13, 23), slice(16, 19)),
    "d": (slice(20, 23), slice(9, 19)),
    "e": (slice(13, 23), slice(9, 12)),
    "f": (slice(5, 15), slice(9, 12)),
    "g": (slice(12, 15), slice(9, 19)),
}
_SEGMENTS_OF_DIGIT = ["abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg", "abcdfg"]


def _generate(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns images and labels of seven-segment digits with random shifts and noise. There are as many as in the
    packaged subset, and every call returns the same ones."""
    size, seed = {"train": (10_000, 1), "test": (2_000, 2)}[split]
    random = np.random.RandomState(seed)
    clean = np.zeros((10, SIDE, SIDE), np.uint8)
    for digit, segments in enumerate(_SEGMENTS_OF_DIGIT):
        for segment in segments:
            clean[digit][_SEGMENTS[segment]] = 200
    labels = random.randint(0, 10, size).astype(np.uint8)
    down, right = random.randint(-4, 5, (2, size, 1))
    positions = np.arange(SIDE)
    rows, columns = (positions - down) % SIDE, (positions - right) % SIDE
    images = clean[labels[:, None, None], rows[:, :, None], columns[:, None, :]]
    return images + random.randint(0, 56, images.shape).astype(np.uint8), labels
