"""Token files as `token_build` writes them, read where they lie: a sample costs the bytes of its window.

The splits are `train` and `val`, or whatever else a folder holds as `<split>.bin` and `<split>.json`.
"""

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from meshwright.cache import cache_folder, made_once
from meshwright.errors import InputError
from meshwright.workloads.text.text_files import Damaged, tell
from meshwright.workloads.text.text_generated import VERSION, generated_texts, no_data
from meshwright.workloads.text.token_build import About, build_tokens

IGNORED = -100
REMEDY = "build it again with meshwright data tokens"


@dataclass(frozen=True)
class TokenFile:
    path: Path
    about: About
    count: int  # that are really there

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.about.dtype).newbyteorder("<")


def tokens(
    split: str = "train",
    root: str | None = None,
    synthetic: bool = False,
    sequence: int = 1024,
    vocabulary: int | None = None,
    limit: int | None = None,
    damaged: Damaged = "fatal",
) -> "Windows":
    """(tokens, targets), each `sequence` long, the targets one ahead: window i begins at token i × `sequence`, and the
    first `limit` are taken. `vocabulary`: what the model has room for; a file with more tokens is refused."""
    return Windows(open_tokens(split, root, synthetic, vocabulary, damaged), sequence, limit, damaged)


def open_tokens(split: str, root: str | None, synthetic: bool, vocabulary: int | None, damaged: Damaged) -> TokenFile:
    if synthetic:
        folder = generated_tokens()
    elif root is not None:
        folder = Path(root)
    else:
        raise no_data(f"{split}.bin and {split}.json (meshwright data tokens TEXTS FOLDER makes them of any texts)")
    found = read_token_file(folder, split, damaged)
    if vocabulary is not None and found.about.vocabulary > vocabulary:
        raise InputError(
            f"{found.path} has a vocabulary of {found.about.vocabulary}, but the model has one of {vocabulary}: set "
            "model.vocabulary and the data's to the larger"
        )
    return found


def generated_tokens() -> Path:
    """A generated text folder, as the same command builds it that builds a real one."""
    folder = cache_folder() / "synthetic" / f"tokens-{VERSION}"
    return made_once(folder, lambda aside: _build_generated(aside))


def _build_generated(folder: Path) -> None:
    build_tokens(generated_texts(), folder, validation=0.1)


def read_token_file(folder: Path, split: str, damaged: Damaged) -> TokenFile:
    path = folder / f"{split}.bin"
    about = _read_about(folder, split)
    if not path.is_file():
        raise InputError(f"{path}: there is no such file beside {split}.json: {REMEDY}")
    itemsize = np.dtype(about.dtype).itemsize
    size = path.stat().st_size
    if size != about.count * itemsize:
        tell(f"{path}: holds {size} bytes, not the {about.count * itemsize} that {split}.json says", damaged, REMEDY)
    return TokenFile(path, about, min(about.count, size // itemsize))


def splits_in(folder: Path) -> list[str]:
    found = sorted(one.stem for one in folder.glob("*.json") if one.with_suffix(".bin").is_file())
    if not found:
        raise InputError(f"{folder}: there are no token files (<split>.bin and <split>.json): {REMEDY}")
    return found


def verify_tokens(folder: Path, split: str) -> int:
    """Reads all of a file, and refuses one whose bytes are not those that were built; how many tokens it has."""
    file = read_token_file(folder, split, "fatal")
    found = hashlib.blake2b(digest_size=16)
    with file.path.open("rb") as opened:
        while block := opened.read(2**20):
            found.update(block)
    if found.hexdigest() != file.about.checksum:
        raise InputError(f"{file.path}: its checksum is {found.hexdigest()}, not {file.about.checksum}: {REMEDY}")
    return file.count


def _read_about(folder: Path, split: str) -> About:
    file = folder / f"{split}.json"
    if not file.is_file():
        there = ", ".join(sorted(one.stem for one in folder.glob("*.json") if one.with_suffix(".bin").is_file()))
        raise InputError(
            f"{file}: there is no such file; the folder has {there or 'no token files'}: set data.root to a folder "
            "that meshwright data tokens made, and split to one of its"
        )
    try:
        raw = json.loads(file.read_text())
        about = About(**{field.name: raw[field.name] for field in fields(About)})
        if about.dtype not in ("uint16", "uint32") or not all(type(n) is int for n in (about.count, about.vocabulary)):
            raise ValueError("dtype, count or vocabulary is not what it should be")
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{file}: is no description of tokens ({error}): {REMEDY}") from None
    return about


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """A window with a token that the vocabulary has not is damaged: it is told, and fatal or counted by no loss."""

    def __init__(self, file: TokenFile, sequence: int, limit: int | None, damaged: Damaged) -> None:
        for name, count in (("sequence", sequence), ("limit", limit)):
            if count is not None and count < 1:
                raise InputError(f"{name} is {count}: write a whole number from 1 on")
        self.file, self.sequence, self.damaged = file, sequence, damaged
        self._size = max(0, file.count - 1) // sequence
        if not self._size:
            raise InputError(
                f"{file.path}: holds {file.count} tokens, too few for one window of sequence = {sequence} and its "
                "target: take a shorter sequence, or more text"
            )
        self._size = min(self._size, limit or self._size)
        self._map: np.ndarray | None = None
        self._told = False

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self._size:
            raise IndexError(index)
        begin = index * self.sequence
        text = torch.from_numpy(self._opened()[begin : begin + self.sequence + 1].astype(np.int64))
        wrong = text >= self.file.about.vocabulary
        if wrong.any():
            self._tell(begin, text, wrong)
            return text.masked_fill(wrong, 0)[:-1], torch.full((self.sequence,), IGNORED)
        return text[:-1], text[1:]

    def _tell(self, begin: int, text: Tensor, wrong: Tensor) -> None:
        if self._told:
            return
        at = int(wrong.int().argmax())
        self._told = self.damaged == "skip"
        words = f"{self.file.path}: token {begin + at} is {int(text[at])}, but its vocabulary has"
        tell(f"{words} {self.file.about.vocabulary}", self.damaged, REMEDY)

    def _opened(self) -> np.ndarray:
        if self._map is None:
            self._map = np.memmap(self.file.path, self.file.dtype, mode="r", shape=(self.file.count,))
        return self._map

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None}  # a map goes to another process as all of its numbers
