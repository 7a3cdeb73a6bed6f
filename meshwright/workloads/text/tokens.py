"""Generated token sequences for decoders. A noisy rule maps each token to the next one, which a model can learn."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from meshwright.data.order import derive_seed
from meshwright.errors import InputError

SPLITS = ("train", "test")
# The rule is an affine map. If the alphabet is a power of two, it visits all tokens before it repeats.
FACTOR, SHIFT = 5, 3


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """(tokens, targets) samples. Sample i is a function of (seed, split, i) and is generated when it is read."""

    def __init__(self, split: str, sequence: int, alphabet: int, samples: int, noise: float, seed: int) -> None:
        self.split, self.sequence, self.alphabet = split, sequence, alphabet
        self.samples, self.noise, self.seed = samples, noise, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "tokens", self.split, index))
        random_tokens = torch.randint(self.alphabet, (self.sequence + 1,), generator=generator).tolist()
        rule_breaks = (torch.rand(self.sequence + 1, generator=generator) < self.noise).tolist()
        sequence = [random_tokens[0]]
        for random_token, breaks_rule in zip(random_tokens[1:], rule_breaks[1:], strict=True):
            sequence.append(random_token if breaks_rule else (FACTOR * sequence[-1] + SHIFT) % self.alphabet)
        text = torch.tensor(sequence)
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
    """Returns a data set of (tokens, targets), each `sequence` long, where a token's target is the next token.

    Only the first `alphabet` tokens of the vocabulary occur, because in real text, too, only few tokens are frequent. A
    share `noise` of the tokens is random instead of following the rule.
    """
    if split not in SPLITS:
        raise InputError(f"split is {split!r}: the generated tokens have {' and '.join(SPLITS)}")
    for name, count in (("sequence", sequence), ("vocabulary", vocabulary), ("samples", samples)):
        if count < 1:
            raise InputError(f"{name} is {count}: write a whole number of at least 1")
    return Tokens(split, sequence, max(1, min(alphabet, vocabulary)), samples, noise, seed)
