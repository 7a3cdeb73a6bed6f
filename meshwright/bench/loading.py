"""How fast samples are loaded: pictures beside torchvision's own loader with the same files, transforms and workers;
and rows of a NumPy array, beside nothing, since nobody else reads them so."""

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

from meshwright.call import load
from meshwright.data.batch import Loading, Share
from meshwright.data.loading import train_batches
from meshwright.workloads.images.augment import MEAN, STD
from meshwright.workloads.images.image_folder import image_folder
from meshwright.workloads.rows import rows

PICTURES = 384
SIZES = ((500, 375), (375, 500))  # ImageNet's usual ones
SHORTER_SIDE = 256  # of the pictures that are kept decoded
BATCH, ROW_BATCH = 32, 8192


@dataclass(frozen=True)
class Row:
    what: str
    workers: int
    rounds: int
    samples_per_s: float
    reference_per_s: float | None
    ratio: float | None  # to the reference, the median of the rounds'
    spread: tuple[float, float] | None


def measure(rounds: int, workers: tuple[int, ...], count: int) -> list[Row]:
    """One thread a process, as ranks have."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            _pictures(Path(folder))
            found = [_pictures_row(folder, number, rounds, cached) for number in workers for cached in (False, True)]
        return [*found, _rows_row(count, rounds)]
    finally:
        torch.set_num_threads(before)


def _pictures_row(folder: str, workers: int, rounds: int, cached: bool) -> Row:
    ours = _ours(folder, workers, cached)
    if cached:
        ours()  # fills it
    ways = ours, _torchvisions(folder, workers)
    pairs = [tuple(_rate(way) for way in (ways if number % 2 else ways[::-1])) for number in range(rounds)]
    ordered = [pair if number % 2 else pair[::-1] for number, pair in enumerate(pairs)]
    ratios = [own / theirs for own, theirs in ordered]
    return Row(
        "pictures, cached" if cached else "pictures",
        workers,
        rounds,
        median(own for own, _ in ordered),
        median(theirs for _, theirs in ordered),
        median(ratios),
        (min(ratios), max(ratios)),
    )


def _rows_row(count: int, rounds: int) -> Row:
    data = rows("train", synthetic=True, count=count)

    def read() -> int:
        batches = train_batches(data, seed=0, global_batch=ROW_BATCH, share=Share(), loading=Loading(), epochs=1)
        return sum(batch.samples for batch in batches)

    return Row("rows", 0, rounds, median(_rate(read) for _ in range(rounds)), None, None, None)


def _rate(read: Callable[[], int]) -> float:
    begun = perf_counter()
    return read() / (perf_counter() - begun)


def _ours(folder: str, workers: int, cached: bool) -> Callable[[], int]:
    kept: dict[str, Any] = {"cache": str(Path(folder) / "kept"), "shorter_side": SHORTER_SIDE} if cached else {}

    def read() -> int:
        loading = Loading(workers=workers)
        data = image_folder("train", root=folder, **kept)
        found = train_batches(data, seed=0, global_batch=BATCH, share=Share(), loading=loading, epochs=1)
        return sum(batch.samples for batch in found)

    return read


def _torchvisions(folder: str, workers: int) -> Callable[[], int]:
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


def _pictures(folder: Path) -> None:
    """With structure at several scales, so that JPEG has work to do."""
    from PIL import Image

    random = np.random.RandomState(0)
    for number in range(PICTURES):
        width, height = SIZES[number % 2]
        picture = np.zeros((height, width, 3))
        for coarse, weight in ((64, 0.45), (8, 0.25), (2, 0.12)):
            patches = random.randint(0, 256, (height // coarse + 2, width // coarse + 2, 3), dtype=np.uint8)
            picture += weight * np.asarray(Image.fromarray(patches).resize((width, height)), float)
        place = folder / "train" / f"class{number % 8}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(place / f"{number}.jpg", quality=90)


def lines(found: list[Row]) -> list[str]:
    told = []
    for row in found:
        beside = ""
        if row.ratio is not None and row.spread is not None:
            beside = (
                f", torchvision {row.reference_per_s:,.0f}: {row.ratio:.2f} times"
                f" ({row.spread[0]:.2f} to {row.spread[1]:.2f}, {row.rounds} rounds)"
            )
        told.append(f"{row.what}, {row.workers} workers: {row.samples_per_s:,.0f} samples/s{beside}")
    return told
