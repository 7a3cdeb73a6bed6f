"""The data of masked language modelling (Devlin et al. 2018): some tokens are hidden, and only these are targets."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from meshwright.errors import InputError
from meshwright.workloads.text.text_files import DamagePolicy
from meshwright.workloads.text.token_file import IGNORED, Windows, open_tokens

MASKED, RANDOM = 0.8, 0.1  # shares of the targets that are masked, or replaced at random; the rest stays visible


def masked(
    split: str = "train",
    root: str | None = None,
    synthetic: bool = False,
    sequence: int = 512,
    vocabulary: int | None = None,
    share: float = 0.15,
    mask: int | None = None,
    limit: int | None = None,
    damaged: DamagePolicy = "fatal",
) -> "Masked":
    """Returns a data set of (tokens, targets), each `sequence` long.

    A `share` of the tokens are targets, drawn again for each epoch and sample. All other targets are -100, which the
    loss ignores. `mask` is the token that replaces hidden tokens; None takes the mask token of the file's tokenizer.
    """
    file = open_tokens(split, root, synthetic, vocabulary, damaged)
    mask_token = file.info.mask if mask is None else mask
    if mask_token is None:
        raise InputError(
            f"{file.path}: its tokenizer {file.info.tokenizer} has no [MASK] or <mask>: build the tokens with a "
            "tokenizer that has one, or set the token that replaces hidden ones by mask: NUMBER"
        )
    if not 0 < share <= 1:
        raise InputError(f"share is {share}: write the share of the tokens that are targets, above 0 and up to 1")
    return Masked(Windows(file, sequence, limit, damaged), share, mask_token)


class Masked(Dataset[tuple[Tensor, Tensor]]):
    """(tokens, targets) samples: the windows of a token file with some tokens hidden."""

    def __init__(self, windows: Windows, share: float, mask: int) -> None:
        self.windows, self.share, self.mask = windows, share, mask

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns sample number `index`. Random numbers come from torch's generator, which the loader seeds by epoch
        and sample."""
        text, next_tokens = self.windows[index]
        # The dtype is fixed: with a default dtype of fp64 other numbers would be drawn.
        target_draw, replacement_draw = torch.rand(2, len(text), dtype=torch.float32)
        random_tokens = torch.randint(self.windows.file.info.vocabulary, text.shape)
        is_target = (target_draw < self.share) & (next_tokens != IGNORED)  # a damaged window has no targets
        inputs = torch.where(is_target & (replacement_draw < MASKED), self.mask, text)
        is_random = is_target & (replacement_draw >= MASKED) & (replacement_draw < MASKED + RANDOM)
        inputs = torch.where(is_random, random_tokens, inputs)
        return inputs, torch.where(is_target, text, IGNORED)
