"""Generated text for decoders: a noisy rule that links each token to the next, so that there is something to learn."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from meshwright.data.order import derive
from meshwright.errors import InputError

SPLITS = ("train", "test")
# An affine map that visits all of 256 (any power of two) tokens before it repeats.
FACTOR, SHIFT = 5, 3


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is a function of (seed, split, i), made when it is asked for; nothing is kept."""

    def __init__(self, split: str, sequence: int, alphabet: int, samples: int, noise: float, seed: int) -> None:
        self.split, self.sequence, self.alphabet = split, sequence, alphabet
        self.samples, self.noise, self.seed = samples, noise, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(derive(self.seed, "tokens", self.split, index))
        drawn = torch.randint(self.alphabet, (self.sequence + 1,), generator=generator).tolist()
        surprises = (torch.rand(self.sequence + 1, generator=generator) < self.noise).tolist()
        made = [drawn[0]]
        for fresh, surprise in zip(drawn[1:], surprises[1:], strict=True):
            made.append(fresh if surprise else (FACTOR * made[-1] + SHIFT) % self.alphabet)
        text = torch.tensor(made)
        return text[:-1], text[1:]


def tokens(
    split: str = "train",
    sequence: int = 1024,
    vocabulary: int = 50257,
    samples: int = 10_000,
    alphabet: int = 256,
    noise: float = 0.1,
    seed: int = 0,
) -> Dataset[tuple[Tensor, Tensor]]:
    """(tokens, targets), each `sequence` long, the targets one ahead. Of the vocabulary only the first `alphabet`
    tokens occur, as in real text few are frequent; a share `noise` of them follows no rule."""
    if split not in SPLITS:
        raise InputError(f"split is {split!r}: the generated tokens have {' and '.join(SPLITS)}")
    for name, count in (("sequence", sequence), ("vocabulary", vocabulary), ("samples", samples)):
        if count < 1:
            raise InputError(f"{name} is {count}: write a whole number from 1 on")
    return Tokens(split, sequence, max(1, min(alphabet, vocabulary)), samples, noise, seed)
