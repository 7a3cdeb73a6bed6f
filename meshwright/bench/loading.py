"""`meshwright bench loading`: how fast samples are loaded. Pictures are compared with torchvision's loader on the same
files, with the same transforms and number of workers. Rows of a NumPy array are compared with nothing, because no other
loader reads them."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from meshwright.data.batch import LoadingOptions, SampleShare
from meshwright.data.loading import train_batches
from meshwright.user.call import load
from meshwright.workloads.images.augment import MEAN, STD
from meshwright.workloads.images.image_folder import image_folder
from meshwright.workloads.rows import rows

PICTURES = 384
SIZES = ((500, 375), (375, 500))  # usual in ImageNet
SHORTER_SIDE = 256  # of decoded pictures in the cache
BATCH, ROW_BATCH = 32, 8192


@dataclass(frozen=True)
class LoadingRow:
    """The loading speed of one kind of data.

    samples_per_s    our samples per second, the median over the rounds
    reference_per_s  the reference's samples per second; None if there is no reference
    ratio            the median over the rounds of our speed divided by the reference's; None if there is no reference
    spread           the lowest and the highest ratio of a round; None if there is no reference
    """

    what: str
    workers: int
    rounds: int
    samples_per_s: float
    reference_per_s: float | None
    ratio: float | None
    spread: tuple[float, float] | None


def measure(rounds: int, workers: tuple[int, ...], count: int) -> list[LoadingRow]:
    """Returns two rows for pictures (without and with a cache) for each number of workers, and one row for an array of
    `count` rows. Every process has one thread, as ranks have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            _write_pictures(Path(folder))
            picture_rows = [
                _pictures_row(folder, number, rounds, cached) for number in workers for cached in (False, True)
            ]
        return [*picture_rows, _rows_row(count, rounds)]
    finally:
        torch.set_num_threads(threads)


def _pictures_row(folder: str, workers: int, rounds: int, cached: bool) -> LoadingRow:
    our_loader = _our_loader(folder, workers, cached)
    if cached:
        our_loader()  # fills the cache
    loaders = our_loader, _torchvision_loader(folder, workers)
    pairs = [tuple(_rate(load) for load in (loaders if number % 2 else loaders[::-1])) for number in range(rounds)]
    ordered = [pair if number % 2 else pair[::-1] for number, pair in enumerate(pairs)]
    ratios = [ours / theirs for ours, theirs in ordered]
    return LoadingRow(
        "pictures, cached" if cached else "pictures",
        workers,
        rounds,
        median(ours for ours, _ in ordered),
        median(theirs for _, theirs in ordered),
        median(ratios),
        (min(ratios), max(ratios)),
    )


def _rows_row(count: int, rounds: int) -> LoadingRow:
    data = rows("train", synthetic=True, count=count)

    def read() -> int:
        batches = train_batches(
            data, seed=0, global_batch=ROW_BATCH, share=SampleShare(), loading=LoadingOptions(), epochs=1
        )
        return sum(batch.samples for batch in batches)

    return LoadingRow("rows", 0, rounds, median(_rate(read) for _ in range(rounds)), None, None, None)


def _rate(read: Callable[[], int]) -> float:
    """Calls `read`, which returns the number of samples that it has read. Returns the samples per second."""
    begin = perf_counter()
    return read() / (perf_counter() - begin)


def _our_loader(folder: str, workers: int, cached: bool) -> Callable[[], int]:
    cache: dict[str, Any] = {"cache": str(Path(folder) / "kept"), "shorter_side": SHORTER_SIDE} if cached else {}

    def read() -> int:
        loading = LoadingOptions(workers=workers)
        data = image_folder("train", root=folder, **cache)
        batches = train_batches(data, seed=0, global_batch=BATCH, share=SampleShare(), loading=loading, epochs=1)
        return sum(batch.samples for batch in batches)

    return read


def _torchvision_loader(folder: str, workers: int) -> Callable[[], int]:
    transforms = load("torchvision:transforms")
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )

    def read() -> int:
        data = load("torchvision.datasets:ImageFolder")(str(Path(folder) / "train"), transform)
        loader = DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers)
        return sum(len(labels) for _, labels in loader)

    return read


def _write_pictures(folder: Path) -> None:
    """Writes JPEG files with structure at several scales, because these take as long to decode as photographs."""
    from PIL import Image

    random = np.random.RandomState(0)
    for number in range(PICTURES):
        width, height = SIZES[number % 2]
        picture = np.zeros((height, width, 3))
        for coarse, weight in ((64, 0.45), (8, 0.25), (2, 0.12)):
            patches = random.randint(0, 256, (height // coarse + 2, width // coarse + 2, 3), dtype=np.uint8)
            picture += weight * np.asarray(Image.fromarray(patches).resize((width, height)), float)
        class_folder = folder / "train" / f"class{number % 8}"
        class_folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(class_folder / f"{number}.jpg", quality=90)


def report_lines(loading_rows: list[LoadingRow]) -> list[str]:
    lines = []
    for row in loading_rows:
        reference = ""
        if row.ratio is not None and row.spread is not None:
            reference = (
                f", torchvision {row.reference_per_s:,.0f}: {row.ratio:.2f} times"
                f" ({row.spread[0]:.2f} to {row.spread[1]:.2f}, {row.rounds} rounds)"
            )
        lines.append(f"{row.what}, {row.workers} workers: {row.samples_per_s:,.0f} samples/s{reference}")
    return lines
