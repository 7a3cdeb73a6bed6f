"""Pairs of a query and the document that answers it, from JSON lines: `{"query": …, "document": …}`.

Each is a text, whose words are numbered by hashing, or a list of token numbers from 1 on. The splits are the files
`train.jsonl` and `val.jsonl`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from meshwright.cache import cache_folder, made_once
from meshwright.data.order import derive
from meshwright.workloads.text.json_lines import JsonLines, token_numbers, wrong_text
from meshwright.workloads.text.text_files import Damaged
from meshwright.workloads.text.text_generated import FACTOR, SHIFT, VERSION, WORDS, no_data, word

SIZES = {"train": 4000, "val": 400}  # of the generated pairs


def pairs(
    split: str = "train",
    root: str | None = None,
    synthetic: bool = False,
    vocabulary: int = 100_000,
    document_vocabulary: int | None = None,
    query_length: int = 16,
    document_length: int = 128,
    limit: int | None = None,
    damaged: Damaged = "fatal",
) -> "Pairs":
    """(query, document, number of the pair): token numbers, cut and padded to their lengths. With other pairs of the
    batch as what a query shall not find, the pair's own number is all the target there is."""
    if synthetic:
        folder = generated_pairs()
    elif root is not None:
        folder = Path(root)
    else:
        raise no_data(f'{split}.jsonl, each line {{"query": …, "document": …}}')
    rooms = {"query": vocabulary, "document": document_vocabulary or vocabulary}

    def wrong(found: dict[str, Any]) -> str | None:
        return next(filter(None, (wrong_text(found, key, room) for key, room in rooms.items())), None)

    lengths = {"query": query_length, "document": document_length}
    return Pairs(JsonLines(folder / f"{split}.jsonl", wrong, f"pairs {rooms}", damaged), rooms, lengths, limit)


class Pairs(Dataset[tuple[Tensor, Tensor, int]]):
    def __init__(self, lines: JsonLines, rooms: dict[str, int], lengths: dict[str, int], limit: int | None) -> None:
        self.lines, self.rooms, self.lengths = lines, rooms, lengths
        self._size = min(len(lines), limit or len(lines))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        if not 0 <= index < self._size:
            raise IndexError(index)
        line = self.lines[index]
        query, document = (
            torch.from_numpy(token_numbers(line[key], self.rooms[key], self.lengths[key])) for key in self.rooms
        )
        return query, document, index


def generated_pairs() -> Path:
    """Documents are about a few words; a query asks for what follows them in the generated language."""
    return made_once(cache_folder() / "synthetic" / f"pairs-{VERSION}", _write)


def _write(folder: Path) -> None:
    for split, size in SIZES.items():
        random = np.random.RandomState(derive(VERSION, "pairs", split) % 2**32)
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(size):
                asked = random.choice(WORDS, 3, replace=False).tolist()
                told = random.choice([(FACTOR * number + SHIFT) % WORDS for number in asked], 12).tolist()
                line = {"query": " ".join(map(word, asked)), "document": " ".join(map(word, told))}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
