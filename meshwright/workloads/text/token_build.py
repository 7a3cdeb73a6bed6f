"""From a folder of texts to token files: `<split>.bin`, plain little-endian numbers, and `<split>.json` about them.

Texts are streamed: memory holds one piece, and the files are there whole or not at all.
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
from meshwright.workloads.text.text_files import Damaged, pieces, text_files

BYTES = 256
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "[SEP]")
MASKS = ("[MASK]", "<mask>")


@dataclass(frozen=True)
class About:
    """What `<split>.json` says of its `<split>.bin`. `end` closes every document, `mask` hides a token; null where the
    tokenizer has none. `checksum` is the hash (blake2b, 16 bytes) of the whole file."""

    dtype: str
    count: int
    vocabulary: int
    tokenizer: str
    end: int | None
    mask: int | None
    checksum: str


@dataclass(frozen=True)
class Tokenizer:
    name: str
    vocabulary: int
    end: int | None
    mask: int | None
    encode: Callable[[str], Any]

    @property
    def dtype(self) -> str:
        return "uint16" if self.vocabulary <= 2**16 else "uint32"


def build_tokens(
    texts: Path, out: Path, tokenizer: str = "bytes", validation: float = 0.01, damaged: Damaged = "fatal"
) -> dict[str, About]:
    """Writes the splits `train` and `val` (a share `validation` of the tokens, in pieces from everywhere) to `out`.

    `tokenizer`: `bytes`, or the path of a `tokenizer.json` of the package tokenizers. Text is encoded in pieces of
    64 KiB, so a token never reaches over the border between two.
    """
    if not 0 <= validation < 1:
        raise InputError(f"validation is {validation}: it is the share of the tokens to evaluate on, below 1")
    chosen = find_tokenizer(tokenizer)
    files = text_files(texts)
    out.mkdir(parents=True, exist_ok=True)
    with _Writer(out, "train", chosen) as train, _Writer(out, "val", chosen) as val:
        for file in files:
            writer = train
            for piece in pieces(file, damaged):
                # As soon as too little of the text has gone there: so the share is kept wherever one looks.
                writer = val if val.count < validation * (train.count + val.count) else train
                writer.write(chosen.encode(piece))
            if chosen.end is not None:
                writer.write([chosen.end])
        if validation and not val.count:
            raise InputError(
                f"{texts}: {train.count} tokens are too few to set a share of {validation} of them aside: add texts, "
                "or set validation to 0"
            )
        if not train.count:
            raise InputError(f"{texts}: its {len(files)} files hold no text")
        if not val.count:  # of an earlier build
            for file in (out / "val.json", out / "val.bin"):
                file.unlink(missing_ok=True)
        return {writer.split: writer.finish() for writer in (train, val) if writer.count}


def find_tokenizer(name: str) -> Tokenizer:
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
        made = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the package has no error of its own
        raise InputError(f"{name} is no tokenizer.json: {' '.join(str(error).split())}") from None
    end, mask = (
        next((made.token_to_id(word) for word in words if made.token_to_id(word) is not None), None)
        for words in (ENDS, MASKS)
    )
    size = made.get_vocab_size()
    return Tokenizer(str(file), size, end, mask, lambda text: made.encode(text, add_special_tokens=False).ids)


class _Writer:
    """A split that is being written, under other names until all of it is there."""

    def __init__(self, out: Path, split: str, tokenizer: Tokenizer) -> None:
        self.split = split
        self.count = 0
        self._out, self._tokenizer = out, tokenizer
        self._part = out / f".{split}.bin.part"
        self._hash = hashlib.blake2b(digest_size=16)

    def __enter__(self) -> Self:
        self._file = self._part.open("wb")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._file.close()
        self._part.unlink(missing_ok=True)

    def write(self, tokens: Any) -> None:
        raw = np.asarray(tokens, np.dtype(self._tokenizer.dtype).newbyteorder("<")).tobytes()
        self._file.write(raw)
        self._hash.update(raw)
        self.count += len(tokens)

    def finish(self) -> About:
        self._file.flush()
        os.fsync(self._file.fileno())
        made = self._tokenizer
        about = About(made.dtype, self.count, made.vocabulary, made.name, made.end, made.mask, self._hash.hexdigest())
        # Without its description the new file is not read, and with the old one it would be read wrongly.
        description = self._out / f"{self.split}.json"
        description.unlink(missing_ok=True)
        self._part.rename(self._out / f"{self.split}.bin")
        part = self._out / f".{self.split}.json.part"
        part.write_text(json.dumps(asdict(about), indent=1) + "\n")
        part.rename(description)
        return about
