"""The data of skip-gram: for each word, a neighbour from the text, and random words that are drawn by their
frequency."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from meshwright.errors import InputError
from meshwright.workloads.text.text_files import DamagePolicy
from meshwright.workloads.text.text_generated import generated_texts, missing_data_error
from meshwright.workloads.text.word_file import DTYPE, Corpus, load_corpus

POWER = 0.75  # negatives are drawn in proportion to this power of their frequency
EVAL_EVERY = 50  # every 50th sample is for evaluation, the others are for training


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
    damaged: DamagePolicy = "fatal",
) -> "WordContexts":
    """Returns a data set of (centers, contexts, targets) from the folder of texts `root`.

    A sample has `centers` consecutive words (centers,). The contexts of each word are a neighbour from the text and
    `negatives` random words (centers, 1 + negatives). Targets are 1 for the neighbour and 0 for the random words.
    Neighbours are up to `window` words away, nearer ones more often. Neighbours and random words are drawn again for
    each epoch and sample. `word_file.load_corpus` explains `vocabulary`, `minimum` and `subsample`.
    """
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
            raise InputError(f"{name} is {count}: write a whole number of at least 1")
    if not synthetic and root is None:
        raise missing_data_error("text files")
    texts = generated_texts() if synthetic else Path(str(root))
    corpus = load_corpus(texts, vocabulary, minimum, subsample, damaged)
    return WordContexts(corpus, split, window, negatives, centers)


class WordContexts(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """(centers, contexts, targets) samples of one split of a corpus, in the form that `words` describes."""

    def __init__(self, corpus: Corpus, split: str, window: int, negatives: int, centers: int) -> None:
        self.corpus, self.window, self.negatives, self.centers = corpus, window, negatives, centers
        samples = corpus.count // centers
        eval_every = EVAL_EVERY if samples >= EVAL_EVERY else 2
        if samples < 2 or corpus.count <= 2 * window or len(corpus.words) < 2:
            raise InputError(
                f"{corpus.path}: {corpus.count} words, {len(corpus.words)} different ones, are too few for samples of "
                f"{centers} words with {window} around each: add texts, or lower centers, window or minimum"
            )
        is_val = np.arange(samples) % eval_every == eval_every - 1
        self.samples = np.flatnonzero(is_val if split == "val" else ~is_val)
        weights = np.cumsum(np.array(corpus.counts, np.float64) ** POWER)
        self.cumulative_probabilities = weights / weights[-1]
        self._map: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns sample number `index`. Random numbers come from numpy's generator, which the loader seeds by epoch
        and sample."""
        text = self._mapped_words()
        positions = int(self.samples[index]) * self.centers + np.arange(self.centers)
        neighbour_positions = self._draw_neighbours(positions, len(text))
        begin = min(positions[0], neighbour_positions.min())
        end = max(positions[-1], neighbour_positions.max()) + 1
        numbers = text[begin:end].astype(np.int64)
        centers, neighbours = numbers[positions - begin], numbers[neighbour_positions - begin]
        draws = np.random.random_sample((self.centers, self.negatives))
        negatives = np.searchsorted(self.cumulative_probabilities, draws)
        negatives = np.where(negatives == neighbours[:, None], (negatives + 1) % len(self.corpus.words), negatives)
        contexts = np.concatenate([neighbours[:, None], negatives], axis=1)
        targets = torch.zeros(contexts.shape, dtype=torch.float32)
        targets[:, 0] = 1
        return torch.from_numpy(centers), torch.from_numpy(contexts), targets

    def _draw_neighbours(self, positions: np.ndarray, length: int) -> np.ndarray:
        """Returns, for each position, the position of a random neighbour, which is always within the text."""
        distance = np.random.randint(1, self.window + 1, self.centers)
        distance = 1 + (np.random.random_sample(self.centers) * distance).astype(np.int64)
        distance *= np.random.randint(0, 2, self.centers) * 2 - 1
        neighbours = positions + distance
        return np.where((neighbours < 0) | (neighbours >= length), positions - distance, neighbours)

    def _mapped_words(self) -> np.ndarray:
        if self._map is None:
            self._map = np.memmap(self.corpus.path, DTYPE, mode="r", shape=(self.corpus.count,))
        return self._map

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None}  # pickling a memory map would send all of its words
