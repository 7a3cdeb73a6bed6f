"""Data sets for language models of transformers: each sample is a dict of the model's arguments, with `labels`, from
which the model computes its loss itself."""

from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils.data import Dataset

from meshwright.errors import InputError
from meshwright.workloads.text import masked as masked_files
from meshwright.workloads.text.text_files import DamagePolicy
from meshwright.workloads.text.token_file import IGNORED
from meshwright.workloads.text.token_file import tokens as token_windows
from meshwright.workloads.text.tokens import tokens as generated_tokens
from meshwright.zoo.generated import GeneratedSamples, refuse_without_synthetic

Sample = dict[str, Tensor]
SAMPLES = 10_000
MASKED_SHARE = 0.15


def causal(
    split: str = "train",
    sequence: int = 1024,
    vocabulary: int = 50257,
    root: str | None = None,
    synthetic: bool = False,
    damaged: DamagePolicy = "fatal",
    samples: int = SAMPLES,
    seed: int = 0,
) -> Dataset[Sample]:
    """Returns a data set of {input_ids, attention_mask, labels}, each `sequence` long. The labels are the tokens
    themselves: the model compares each with its score at the token before.

    The tokens are windows of the token files in `root`, which `meshwright data tokens` writes. With `synthetic` they
    are generated, and `samples` is their number.
    """
    if synthetic:
        return TextSamples(_generated(split, sequence, vocabulary, samples, seed))
    return TextSamples(token_windows(split, root, False, sequence, vocabulary, damaged=damaged))


def masked(
    split: str = "train",
    sequence: int = 512,
    vocabulary: int = 30522,
    root: str | None = None,
    synthetic: bool = False,
    damaged: DamagePolicy = "fatal",
    mask: int | None = None,
    samples: int = SAMPLES,
    seed: int = 0,
) -> Dataset[Sample]:
    """Returns a data set of {input_ids, attention_mask, labels}, each `sequence` long. A share of the tokens is hidden,
    and only these have a label; the labels of the others are -100, which the loss ignores. `mask` is the token
    that hides another one; None takes the mask token of the file's tokenizer. `root`, `synthetic` and `samples` are as
    for `causal`."""
    if synthetic:
        return MaskedSamples(_generated(split, sequence, vocabulary, samples, seed), split, samples, seed)
    windows = masked_files.masked(split, root, False, sequence, vocabulary, mask=mask, damaged=damaged)
    return LabelledSamples(windows)


def sequence_to_sequence(
    split: str = "train",
    sequence: int = 512,
    vocabulary: int = 32128,
    synthetic: bool = False,
    samples: int = SAMPLES,
    seed: int = 0,
) -> Dataset[Sample]:
    """Returns a data set of generated {input_ids, attention_mask, labels}, each `sequence` long. The model learns to
    repeat its input."""
    refuse_without_synthetic("sequence_to_sequence", synthetic)
    return TextSamples(_generated(split, sequence, vocabulary, samples, seed))


def classified(
    split: str = "train",
    sequence: int = 512,
    vocabulary: int = 30522,
    classes: int = 2,
    problem: str = "single_label_classification",
    synthetic: bool = False,
    samples: int = SAMPLES,
    seed: int = 0,
) -> Dataset[Sample]:
    """Returns a data set of generated {input_ids, attention_mask, labels}: texts of `sequence` tokens. `problem` is
    transformers' `problem_type`, which says whether the label of a text is one of the `classes`, one number
    (`regression`), or a number of 0 or 1 for each of them (`multi_label_classification`)."""
    refuse_without_synthetic("classified", synthetic)
    if vocabulary < 2 or classes < 1:
        raise InputError(
            f"vocabulary is {vocabulary} and classes is {classes}: there must be at least 2 tokens, 1 class"
        )
    return ClassifiedSamples(split, sequence, vocabulary, classes, problem, samples, seed)


def _generated(split: str, sequence: int, vocabulary: int, samples: int, seed: int) -> Dataset[tuple[Tensor, Tensor]]:
    return generated_tokens("train" if split == "train" else "test", sequence, vocabulary, samples, seed=seed)


class TextSamples(Dataset[Sample]):
    """{input_ids, attention_mask, labels} of a data set of (tokens, next tokens). The labels are the tokens, except
    where the next token is ignored because the text is damaged."""

    def __init__(self, windows: Any) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Sample:
        tokens, next_tokens = self.windows[index]
        return _sample(tokens, torch.where(next_tokens == IGNORED, IGNORED, tokens))


class LabelledSamples(Dataset[Sample]):
    """{input_ids, attention_mask, labels} of a data set of (tokens, labels)."""

    def __init__(self, windows: Any) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Sample:
        return _sample(*self.windows[index])


class MaskedSamples(GeneratedSamples):
    """Generated texts in which a share of the tokens is replaced by token 0; at least one in each text."""

    def __init__(self, windows: Any, split: str, samples: int, seed: int) -> None:
        super().__init__(split, samples, seed)
        self.windows = windows

    def make(self, index: int, generator: Generator) -> Sample:
        text, _ = self.windows[index]
        hidden = torch.rand(text.shape, generator=generator, dtype=torch.float32) < MASKED_SHARE
        hidden[0] |= ~hidden.any()
        return _sample(torch.where(hidden, 0, text), torch.where(hidden, text, IGNORED))


class ClassifiedSamples(GeneratedSamples):
    """Generated texts, in each of which the tokens come from the part of the vocabulary that belongs to its class."""

    def __init__(
        self, split: str, sequence: int, vocabulary: int, classes: int, problem: str, samples: int, seed: int
    ) -> None:
        super().__init__(split, samples, seed)
        self.sequence, self.vocabulary, self.classes, self.problem = sequence, vocabulary, classes, problem

    def make(self, index: int, generator: Generator) -> Sample:
        label = torch.randint(max(2, self.classes), (), generator=generator)
        part = max(1, (self.vocabulary - 1) // max(2, self.classes))
        tokens = 1 + (label * part + torch.randint(part, (self.sequence,), generator=generator)) % (self.vocabulary - 1)
        if self.problem == "regression":
            return _sample(tokens, (2.0 * label - 1).expand(self.classes).squeeze())
        if self.problem == "multi_label_classification":
            return _sample(tokens, (torch.arange(self.classes) == label).float())
        return _sample(tokens, label)


def _sample(tokens: Tensor, labels: Tensor) -> Sample:
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
