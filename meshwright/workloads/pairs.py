"""Pairs of a query and a matching document, from JSON lines: `{"query": …, "document": …}`.

Query and document are texts, whose words are numbered by hashing, or lists of token numbers of at least 1. The splits
are the files `train.jsonl` and `val.jsonl`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from meshwright.data.order import derive_seed
from meshwright.errors import InputError
from meshwright.files.cache import cache_folder, fill_once
from meshwright.workloads.text.json_lines import JsonLines, text_problem, token_numbers
from meshwright.workloads.text.text_files import DamagePolicy
from meshwright.workloads.text.text_generated import (
    FACTOR,
    SHIFT,
    VERSION,
    WORDS,
    generated_word,
    missing_data_error,
)

SIZES = {"train": 4000, "val": 400}  # generated pairs


def pairs(
    split: str = "train",
    root: str | None = None,
    synthetic: bool = False,
    vocabulary: int = 100_000,
    document_vocabulary: int | None = None,
    query_length: int = 16,
    document_length: int = 128,
    limit: int | None = None,
    damaged: DamagePolicy = "fatal",
) -> "Pairs":
    """Returns a data set of (query, document, index of the pair). Query and document are token numbers, cut or padded
    to `query_length` and `document_length`. The index stands in the place of the target. The in-batch softmax needs no
    target, because the other pairs of the batch are its negatives."""
    if synthetic:
        folder = generated_pairs()
    elif root is not None:
        folder = Path(root)
    else:
        raise missing_data_error(f'{split}.jsonl, each line {{"query": …, "document": …}}')
    vocabularies = {"query": vocabulary, "document": document_vocabulary or vocabulary}
    for key, size in vocabularies.items():
        if not isinstance(size, int) or size < 2:
            raise InputError(
                f"the vocabulary of a {key} is {size!r}: write a whole number of at least 2 (0 is padding)"
            )

    def line_problem(line: dict[str, Any]) -> str | None:
        return next(filter(None, (text_problem(line, key, size) for key, size in vocabularies.items())), None)

    lengths = {"query": query_length, "document": document_length}
    lines = JsonLines(folder / f"{split}.jsonl", line_problem, f"pairs {vocabularies}", damaged)
    return Pairs(lines, vocabularies, lengths, limit)


class Pairs(Dataset[tuple[Tensor, Tensor, int]]):
    """(query, document, index) samples. `vocabularies` and `lengths` have the keys "query" and "document"."""

    def __init__(
        self, lines: JsonLines, vocabularies: dict[str, int], lengths: dict[str, int], limit: int | None
    ) -> None:
        self.lines, self.vocabularies, self.lengths = lines, vocabularies, lengths
        self._size = min(len(lines), limit or len(lines))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        if not 0 <= index < self._size:
            raise IndexError(index)
        line = self.lines[index]
        query, document = (
            torch.from_numpy(token_numbers(line[key], vocabulary, self.lengths[key]))
            for key, vocabulary in self.vocabularies.items()
        )
        return query, document, index


def generated_pairs() -> Path:
    """Returns the folder of the generated pairs, and writes them if they are not in the cache. The generated language
    determines which word follows a word; a document consists of the words that follow the words of its query."""
    return fill_once(cache_folder() / "synthetic" / f"pairs-{VERSION}", _write)


def _write(folder: Path) -> None:
    for split, size in SIZES.items():
        random = np.random.RandomState(derive_seed(VERSION, "pairs", split) % 2**32)
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(size):
                query = random.choice(WORDS, 3, replace=False).tolist()
                document = random.choice([(FACTOR * number + SHIFT) % WORDS for number in query], 12).tolist()
                line = {
                    "query": " ".join(map(generated_word, query)),
                    "document": " ".join(map(generated_word, document)),
                }
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
