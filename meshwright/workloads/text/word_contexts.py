"""Words and what stands around them, for skip-gram: neighbours from the text, and others drawn by their frequency."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from meshwright.errors import InputError
from meshwright.workloads.text.text_files import Damaged
from meshwright.workloads.text.text_generated import generated_texts, no_data
from meshwright.workloads.text.word_file import DTYPE, Corpus, corpus

POWER = 0.75  # of a word's frequency, by which it is drawn as one that was not there
EVERY = 50  # one sample of so many is evaluated on, and not trained on


def words(
    split: str = "train",
    root: str | None = None,
    synthetic: bool = False,
    vocabulary: int = 100_000,
    minimum: int = 5,
    window: int = 5,
    negatives: int = 5,
    centers: int = 64,
    subsample: float | None = 1e-4,
    damaged: Damaged = "fatal",
) -> "WordContexts":
    """(words, a neighbour and `negatives` others for each, which of these was there). A sample is `centers` words that
    follow one another. Neighbours are up to `window` words away, nearer ones more often; they and the others are
    drawn anew for each epoch and sample. The vocabulary is that of the folder of texts `root`; `word_file` says what
    `minimum` and `subsample` are."""
    if split not in ("train", "val"):
        raise InputError(f"split is {split!r}: words have train and val")
    counts = {
        "vocabulary": vocabulary,
        "minimum": minimum,
        "window": window,
        "negatives": negatives,
        "centers": centers,
    }
    for name, count in counts.items():
        if count < 1:
            raise InputError(f"{name} is {count}: write a whole number from 1 on")
    if not synthetic and root is None:
        raise no_data("text files")
    texts = generated_texts() if synthetic else Path(str(root))
    return WordContexts(corpus(texts, vocabulary, minimum, subsample, damaged), split, window, negatives, centers)


class WordContexts(Dataset[tuple[Tensor, Tensor, Tensor]]):
    def __init__(self, corpus: Corpus, split: str, window: int, negatives: int, centers: int) -> None:
        self.corpus, self.window, self.negatives, self.centers = corpus, window, negatives, centers
        samples = corpus.count // centers
        every = EVERY if samples >= EVERY else 2
        if samples < 2 or corpus.count <= 2 * window or len(corpus.words) < 2:
            raise InputError(
                f"{corpus.path}: {corpus.count} words, {len(corpus.words)} different ones, are too few for samples of "
                f"{centers} words with {window} around each: add texts, or lower centers, window or minimum"
            )
        own = np.arange(samples) % every == every - 1
        self.samples = np.flatnonzero(own if split == "val" else ~own)
        weights = np.cumsum(np.array(corpus.counts, np.float64) ** POWER)
        self.chances = weights / weights[-1]
        self._map: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draws from numpy's generator, which the loader seeds by epoch and sample."""
        text = self._opened()
        places = int(self.samples[index]) * self.centers + np.arange(self.centers)
        reach = np.random.randint(1, self.window + 1, self.centers)
        reach = 1 + (np.random.random_sample(self.centers) * reach).astype(np.int64)
        reach *= np.random.randint(0, 2, self.centers) * 2 - 1
        beside = places + reach
        beside = np.where((beside < 0) | (beside >= len(text)), places - reach, beside)
        first, last = min(places[0], beside.min()), max(places[-1], beside.max()) + 1
        near = text[first:last].astype(np.int64)
        center, neighbour = near[places - first], near[beside - first]
        others = np.searchsorted(self.chances, np.random.random_sample((self.centers, self.negatives)))
        others = np.where(others == neighbour[:, None], (others + 1) % len(self.corpus.words), others)
        contexts = np.concatenate([neighbour[:, None], others], axis=1)
        right = torch.zeros(contexts.shape, dtype=torch.float32)
        right[:, 0] = 1
        return torch.from_numpy(center), torch.from_numpy(contexts), right

    def _opened(self) -> np.ndarray:
        if self._map is None:
            self._map = np.memmap(self.corpus.path, DTYPE, mode="r", shape=(self.corpus.count,))
        return self._map

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None}  # a map goes to another process as all of its numbers
