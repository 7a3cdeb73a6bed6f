"""Small data sets in the layouts of real ones, and the global batches that ranks load from them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from meshwright.data.loading import LoadingOptions, SampleShare, train_batches

SEED, BATCH = 3, 8


def noise(number: int, width: int = 24, height: int = 20) -> Image.Image:
    random = np.random.RandomState(number)
    return Image.fromarray(random.randint(0, 256, (height, width, 3), dtype=np.uint8))


def make_folders(root: Path, split: str = "train", classes: tuple[str, ...] = ("ant", "bee"), each: int = 10) -> Path:
    """Writes root/split/<class>/<number>.png. PNG is lossless, so tests know every pixel."""
    for label, name in enumerate(classes):
        folder = root / split / name
        folder.mkdir(parents=True)
        for number in range(each):
            noise(label * each + number).save(folder / f"{number:03}.png")
    return root


def make_voc_folders(folder: Path, names: tuple[str, ...], split: str = "train", classes: int = 21) -> Path:
    """Writes VOC's folders with pictures of noise, and masks of two classes with rows of 255 between them."""
    for inside in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (folder / inside).mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        noise(number).save(folder / "JPEGImages" / f"{name}.jpg", quality=95)
        save_mask(folder / "SegmentationClass" / f"{name}.png", [(number % classes), 255, (number + 1) % classes])
    (folder / "ImageSets" / "Segmentation" / f"{split}.txt").write_text("\n".join(names) + "\n")
    return folder


def save_mask(file: Path, bands: list[int], width: int = 24, height: int = 20) -> None:
    rows = np.repeat(np.array(bands, np.uint8), -(-height // len(bands)))[:height]
    mask = Image.fromarray(np.repeat(rows[:, None], width, axis=1))
    mask.putpalette([(color * 7) % 256 for color in range(768)])
    mask.save(file)


def global_batches(
    dataset: Any, ranks: int = 1, workers: int = 0, start: tuple[int, int] = (0, 0)
) -> list[tuple[Tensor, Tensor]]:
    """The images and targets of all global batches of two epochs, concatenated from the shares of the ranks."""
    shares = []
    for rank in range(ranks):
        batches = train_batches(
            dataset,
            seed=SEED,
            global_batch=BATCH,
            share=SampleShare(rank, ranks),
            loading=LoadingOptions(workers=workers),
            start=start,
            epochs=2,
        )
        shares.append([[part.data for part in batch.microbatches if part.samples] for batch in batches])
    concatenated = []
    for shares_of_batch in zip(*shares, strict=True):
        parts = [part for share in shares_of_batch for part in share]
        concatenated.append((torch.cat([images for images, _ in parts]), torch.cat([targets for _, targets in parts])))
    return concatenated


def are_equal(first: list[tuple[Tensor, Tensor]], second: list[tuple[Tensor, Tensor]]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a, b) for pair in zip(first, second, strict=True) for a, b in zip(*pair, strict=True)
    )
