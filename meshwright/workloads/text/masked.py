"""Masked language: which tokens are hidden from a model, and that it is asked for them alone (Devlin et al. 2018)."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from meshwright.errors import InputError
from meshwright.workloads.text.text_files import Damaged
from meshwright.workloads.text.token_file import IGNORED, Windows, open_tokens

MASKED, RANDOM = 0.8, 0.1  # of the chosen tokens; the others stay as they are


def masked(
    split: str = "train",
    root: str | None = None,
    synthetic: bool = False,
    sequence: int = 512,
    vocabulary: int | None = None,
    share: float = 0.15,
    mask: int | None = None,
    limit: int | None = None,
    damaged: Damaged = "fatal",
) -> "Masked":
    """(tokens, targets), each `sequence` long: a share of the tokens is chosen anew for each epoch and sample, and the
    targets are -100 everywhere else. `mask`: the token that hides others, where the file's tokenizer names none."""
    file = open_tokens(split, root, synthetic, vocabulary, damaged)
    hiding = file.about.mask if mask is None else mask
    if hiding is None:
        raise InputError(
            f"{file.path}: its tokenizer {file.about.tokenizer} has no [MASK] or <mask>: build the tokens with one "
            "that has, or say by mask: NUMBER which token hides others"
        )
    if not 0 < share <= 1:
        raise InputError(f"share is {share}: it is how much of the tokens is hidden, above 0 and up to 1")
    return Masked(Windows(file, sequence, limit, damaged), share, hiding)


class Masked(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, windows: Windows, share: float, mask: int) -> None:
        self.windows, self.share, self.mask = windows, share, mask

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Draws from torch's generator, which the loader seeds by epoch and sample."""
        text, ahead = self.windows[index]
        # In a dtype of its own: a program that computes in fp64 by default would draw other numbers.
        chosen, fate = torch.rand(2, len(text), dtype=torch.float32)
        drawn = torch.randint(self.windows.file.about.vocabulary, text.shape)
        hidden = (chosen < self.share) & (ahead != IGNORED)  # a damaged window asks for nothing
        given = torch.where(hidden & (fate < MASKED), self.mask, text)
        given = torch.where(hidden & (fate >= MASKED) & (fate < MASKED + RANDOM), drawn, given)
        return given, torch.where(hidden, text, IGNORED)
