"""Builds token files from a folder of texts: `<split>.bin` holds little-endian integers, `<split>.json` describes them.

Texts are streamed, so only one piece of them is in memory. The files get their final names only when they are complete.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from meshwright.errors import InputError
from meshwright.files.storage import write_atomically, writing
from meshwright.workloads.text.text_files import DamagePolicy, text_files, text_pieces

BYTES = 256
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "[SEP]")
MASK_TOKENS = ("[MASK]", "<mask>")


@dataclass(frozen=True)
class TokenFileInfo:
    """The content of `<split>.json`, which describes `<split>.bin`.

    `end` is the token that follows every document and `mask` the one that replaces hidden tokens; None if the
    tokenizer has no such token. `checksum` is the blake2b hash (16 bytes) of the whole `<split>.bin`.
    """

    dtype: str
    count: int
    vocabulary: int
    tokenizer: str
    end: int | None
    mask: int | None
    checksum: str


@dataclass(frozen=True)
class Tokenizer:
    """A function that turns texts into token numbers, and what is known of it. `encode` returns the token numbers of a
    text as a list or an array. `end` is the token that follows every document and `mask` the one that replaces hidden
    tokens; None if there is no such token."""

    name: str
    vocabulary: int
    end: int | None
    mask: int | None
    encode: Callable[[str], Any]

    @property
    def dtype(self) -> str:
        return "uint16" if self.vocabulary <= 2**16 else "uint32"


def build_tokens(
    texts: Path, out: Path, tokenizer: str = "bytes", validation: float = 0.01, damaged: DamagePolicy = "fatal"
) -> dict[str, TokenFileInfo]:
    """Writes the splits `train` and `val` to the folder `out`, and returns their descriptions by split.

    `validation` is the share of the tokens that goes to `val`, in pieces spread evenly over all texts. `tokenizer` is
    `bytes`, or the path of a `tokenizer.json` of the package tokenizers. Text is encoded in pieces of 64 KiB, so no
    token spans two pieces.
    """
    if not 0 <= validation < 1:
        raise InputError(f"validation is {validation}: write the share of the tokens to evaluate on, from 0 to below 1")
    encoder = find_tokenizer(tokenizer)
    files = text_files(texts)
    with (
        writing(out),
        _SplitWriter(out, "train", encoder) as train,
        _SplitWriter(out, "val", encoder) as val,
    ):
        for file in files:
            writer = train
            for piece in text_pieces(file, damaged):
                # A piece goes to val whenever val has less than its share, so val has pieces from all texts.
                writer = val if val.count < validation * (train.count + val.count) else train
                writer.write(encoder.encode(piece))
            if encoder.end is not None:
                writer.write([encoder.end])
        if validation and not val.count:
            raise InputError(
                f"{texts}: {train.count} tokens are too few to set a share of {validation} of them aside: add texts, "
                "or set validation to 0"
            )
        if not train.count:
            raise InputError(f"{texts}: its {len(files)} files hold no text: add texts")
        if not val.count:  # remove the files of an earlier build
            for file in (out / "val.json", out / "val.bin"):
                file.unlink(missing_ok=True)
        return {writer.split: writer.finish() for writer in (train, val) if writer.count}


def find_tokenizer(name: str) -> Tokenizer:
    """Returns the tokenizer of single bytes, or the one in the file `name`."""
    if name == "bytes":
        return Tokenizer("bytes", BYTES + 2, BYTES, BYTES + 1, lambda text: np.frombuffer(text.encode(), np.uint8))
    file = Path(name)
    if not file.is_file():
        raise InputError(f"there is no tokenizer file {name}: write 'bytes' or the path of a tokenizer.json")
    try:
        import tokenizers
    except ImportError:
        raise InputError(f"{name} needs the package tokenizers: pip install tokenizers, or write 'bytes'") from None
    try:
        loaded = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the package tokenizers raises plain Exception
        raise InputError(f"{name} is no tokenizer.json: {' '.join(str(error).split())}") from None
    end, mask = (
        next((loaded.token_to_id(word) for word in words if loaded.token_to_id(word) is not None), None)
        for words in (END_TOKENS, MASK_TOKENS)
    )
    size = loaded.get_vocab_size()
    return Tokenizer(str(file), size, end, mask, lambda text: loaded.encode(text, add_special_tokens=False).ids)


class _SplitWriter:
    """A context manager that writes the two files of a split, under temporary names until they are complete."""

    def __init__(self, out: Path, split: str, tokenizer: Tokenizer) -> None:
        self.split = split
        self.count = 0
        self._out, self._tokenizer = out, tokenizer
        self._part = out / f".{split}.bin.part"
        self._hash = hashlib.blake2b(digest_size=16)

    def __enter__(self) -> Self:
        self._out.mkdir(parents=True, exist_ok=True)
        self._file = self._part.open("wb")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        try:
            self._file.close()
        finally:
            self._part.unlink(missing_ok=True)

    def write(self, tokens: Any) -> None:
        raw = np.asarray(tokens, np.dtype(self._tokenizer.dtype).newbyteorder("<")).tobytes()
        self._file.write(raw)
        self._hash.update(raw)
        self.count += len(tokens)

    def finish(self) -> TokenFileInfo:
        """Gives the files their final names, and returns the description that is in `<split>.json`."""
        self._file.flush()
        os.fsync(self._file.fileno())
        tokenizer = self._tokenizer
        info = TokenFileInfo(
            tokenizer.dtype,
            self.count,
            tokenizer.vocabulary,
            tokenizer.name,
            tokenizer.end,
            tokenizer.mask,
            self._hash.hexdigest(),
        )
        # The old description is deleted first: if the next steps are interrupted, it must not describe the new tokens.
        description = self._out / f"{self.split}.json"
        description.unlink(missing_ok=True)
        self._part.rename(self._out / f"{self.split}.bin")
        write_atomically(description, json.dumps(asdict(info), indent=1) + "\n")
        return info
