"""Memory-mapped token files, as `token_build` writes them. Reading a sample reads only the bytes of its window.

The splits are `train` and `val`, or any other that a folder holds as `<split>.bin` and `<split>.json`.
"""

import hashlib
import json
from dataclasses import dataclass, fields
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from meshwright.errors import InputError
from meshwright.files.cache import cache_folder, fill_once
from meshwright.workloads.text.text_files import DamagePolicy, report_damage
from meshwright.workloads.text.text_generated import VERSION, generated_texts, missing_data_error
from meshwright.workloads.text.token_build import TokenFileInfo, build_tokens

IGNORED = -100  # the target that torch's cross entropy ignores
REMEDY = "build it again with meshwright data tokens"
# Generated texts: at least as many documents of 500 words, which have more tokens (bytes) than this, the share of them
# that is for validation, and the windows that all of them have, so that validation has one.
_DOCUMENTS, _LEAST_DOCUMENT_TOKENS, _VALIDATION, _WINDOWS = 200, 2_000, 0.1, 12


@dataclass(frozen=True)
class TokenFile:
    """A file `<split>.bin` and its description. `count` is the number of tokens that the file really holds. It is
    smaller than `info.count` if the file was truncated."""

    path: Path
    info: TokenFileInfo
    count: int

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.info.dtype).newbyteorder("<")


def tokens(
    split: str = "train",
    root: str | None = None,
    synthetic: bool = False,
    sequence: int = 1024,
    vocabulary: int | None = None,
    limit: int | None = None,
    damaged: DamagePolicy = "fatal",
) -> "Windows":
    """Returns a data set of (tokens, targets), each `sequence` long, where a token's target is the next token.

    Sample i begins at token i × `sequence`. `limit` keeps only the first samples. `vocabulary` is the size of the
    model's vocabulary; a file with a larger vocabulary is an error.
    """
    file = open_tokens(split, root, synthetic, vocabulary, damaged, sequence)
    return Windows(file, sequence, limit, damaged)


def open_tokens(
    split: str, root: str | None, synthetic: bool, vocabulary: int | None, damaged: DamagePolicy, sequence: int = 1
) -> TokenFile:
    """Returns the token file of a split, which is generated if `synthetic`, for windows of `sequence` tokens. Raises
    InputError if the file's vocabulary is larger than the model's `vocabulary`."""
    if synthetic:
        folder = generated_tokens(sequence)
    elif root is not None:
        folder = Path(root)
    else:
        raise missing_data_error(
            f"{split}.bin and {split}.json (meshwright data tokens TEXTS FOLDER makes them from any texts)"
        )
    file = read_token_file(folder, split, damaged)
    if vocabulary is not None and file.info.vocabulary > vocabulary:
        raise InputError(
            f"{file.path} has a vocabulary of {file.info.vocabulary}, but the model has one of {vocabulary}: set "
            f"model.vocabulary, data.train.vocabulary and data.eval.vocabulary to {file.info.vocabulary} or more"
        )
    return file


def generated_tokens(sequence: int = 1) -> Path:
    """Returns the folder of the token files of the generated texts, and builds them if they are not in the cache. Each
    of them has at least one window of `sequence` tokens."""
    documents = max(_DOCUMENTS, ceil(_WINDOWS * sequence / _LEAST_DOCUMENT_TOKENS))
    more = f"-{documents}" if documents > _DOCUMENTS else ""
    folder = cache_folder() / "synthetic" / f"tokens-{VERSION}{more}"
    return fill_once(folder, partial(_build_generated, documents))


def _build_generated(documents: int, folder: Path) -> None:
    build_tokens(generated_texts(documents), folder, validation=_VALIDATION)


def read_token_file(folder: Path, split: str, damaged: DamagePolicy) -> TokenFile:
    """Returns the token file of a split without reading its tokens. A file of the wrong size is an error, or only a
    warning if `damaged` is "skip"."""
    path = folder / f"{split}.bin"
    info = _read_info(folder, split)
    if not path.is_file():
        raise InputError(f"{path}: there is no such file, although {split}.json exists: {REMEDY}")
    itemsize = np.dtype(info.dtype).itemsize
    size = path.stat().st_size
    if size != info.count * itemsize:
        damage = f"{path}: holds {size} bytes, not the {info.count * itemsize} that {split}.json says"
        report_damage(damage, damaged, REMEDY)
    return TokenFile(path, info, min(info.count, size // itemsize))


def splits_in(folder: Path) -> list[str]:
    """Returns the names of a folder's splits, sorted; a folder without any is an error."""
    splits = _find_splits(folder)
    if not splits:
        raise InputError(f"{folder}: there are no token files (<split>.bin and <split>.json): {REMEDY}")
    return splits


def _find_splits(folder: Path) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.json") if file.with_suffix(".bin").is_file())


def verify_tokens(folder: Path, split: str) -> int:
    """Reads a whole token file, and returns its number of tokens. It is an error if the checksum differs from the one
    that was stored when the file was built."""
    file = read_token_file(folder, split, "fatal")
    checksum = hashlib.blake2b(digest_size=16)
    with file.path.open("rb") as stream:
        while block := stream.read(2**20):
            checksum.update(block)
    if checksum.hexdigest() != file.info.checksum:
        raise InputError(f"{file.path}: its checksum is {checksum.hexdigest()}, not {file.info.checksum}: {REMEDY}")
    return file.count


def _read_info(folder: Path, split: str) -> TokenFileInfo:
    file = folder / f"{split}.json"
    if not file.is_file():
        splits = ", ".join(_find_splits(folder))
        raise InputError(
            f"{file}: there is no such file; the folder has {splits or 'no token files'}: set data.root to a folder "
            "that meshwright data tokens wrote, and split to one of its splits"
        )
    try:
        raw = json.loads(file.read_text())
        info = TokenFileInfo(**{field.name: raw[field.name] for field in fields(TokenFileInfo)})
        if info.dtype not in ("uint16", "uint32") or not all(type(n) is int for n in (info.count, info.vocabulary)):
            raise ValueError("dtype must be uint16 or uint32, count and vocabulary whole numbers")
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{file}: does not describe a token file ({error}): {REMEDY}") from None
    return info


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """(tokens, targets) samples: consecutive windows of a token file, where the target of each token is the next token.

    A window with a token outside the vocabulary is damaged. This is an error if `damaged` is "fatal". If it is "skip",
    there is a warning, and the loss ignores all targets of the window.
    """

    def __init__(self, file: TokenFile, sequence: int, limit: int | None, damaged: DamagePolicy) -> None:
        for name, count in (("sequence", sequence), ("limit", limit)):
            if count is not None and count < 1:
                raise InputError(f"{name} is {count}: write a whole number of at least 1")
        self.file, self.sequence, self.damaged = file, sequence, damaged
        self._size = max(0, file.count - 1) // sequence
        if not self._size:
            raise InputError(
                f"{file.path}: holds {file.count} tokens, too few for one window of sequence = {sequence} and its "
                "last target: set a shorter sequence, or add texts"
            )
        self._size = min(self._size, limit or self._size)
        self._map: np.ndarray | None = None
        self._has_reported = False

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self._size:
            raise IndexError(index)
        begin = index * self.sequence
        text = torch.from_numpy(self._mapped_tokens()[begin : begin + self.sequence + 1].astype(np.int64))
        is_unknown = text >= self.file.info.vocabulary
        if is_unknown.any():
            self._report(begin, text, is_unknown)
            return text.masked_fill(is_unknown, 0)[:-1], torch.full((self.sequence,), IGNORED)
        return text[:-1], text[1:]

    def _report(self, begin: int, text: Tensor, is_unknown: Tensor) -> None:
        """Reports the first unknown token of this data set; later ones are not reported again."""
        if self._has_reported:
            return
        first = int(is_unknown.int().argmax())
        self._has_reported = self.damaged == "skip"
        damage = f"{self.file.path}: token {begin + first} is {int(text[first])}, but its vocabulary has"
        report_damage(f"{damage} {self.file.info.vocabulary}", self.damaged, REMEDY)

    def _mapped_tokens(self) -> np.ndarray:
        if self._map is None:
            self._map = np.memmap(self.file.path, self.file.dtype, mode="r", shape=(self.file.count,))
        return self._map

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None}  # pickling a memory map would send all of its tokens
