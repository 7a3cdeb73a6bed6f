"""From a folder of texts to a corpus of words: `words.bin`, the number of every word in turn, and `words.json`, which
words these are. Made once and kept in the cache folder, as long as the texts stay the same.

Both passes over the texts stream them; memory holds the vocabulary.
"""

import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.cache import cache_folder, made_once
from meshwright.data.order import derive
from meshwright.errors import InputError
from meshwright.workloads.text.text_files import Damaged, pieces, text_files

DTYPE = np.dtype("<u4")
VERSION = 1  # of what is cached
_WORD = re.compile(r"\w+")
_MOST_COUNTED = 5_000_000  # different words, beyond which the rarest are forgotten while counting


@dataclass(frozen=True)
class Corpus:
    """`words` from the most frequent to the rarest, with how often each occurs in the texts; `count` is the length of
    `path`."""

    path: Path
    words: tuple[str, ...]
    counts: tuple[int, ...]
    count: int


def corpus(texts: Path, vocabulary: int, minimum: int, subsample: float | None, damaged: Damaged) -> Corpus:
    """At most `vocabulary` words, of which each occurs `minimum` times or more; the others are left out. `subsample`: a
    word that makes up a larger share of the text is left out at times, the more so the larger it is (Mikolov et al.
    2013, as their program does it)."""
    files = text_files(texts)
    said = [VERSION, vocabulary, minimum, subsample, damaged, str(texts.resolve())]
    seen = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = hashlib.blake2b(json.dumps([said, seen]).encode(), digest_size=16).hexdigest()

    def make(folder: Path) -> None:
        _write(folder, files, vocabulary, minimum, subsample, damaged)

    folder = made_once(cache_folder() / "words" / key, make)
    about = json.loads((folder / "words.json").read_text())
    return Corpus(folder / "words.bin", tuple(about["words"]), tuple(about["counts"]), about["count"])


def _write(
    folder: Path, files: list[Path], vocabulary: int, minimum: int, subsample: float | None, damaged: Damaged
) -> None:
    counter = _counted(files, damaged)
    # Words that are equally frequent go by their letters: the order in which files were read is no matter.
    ranked = sorted(counter.items(), key=lambda item: (-item[1], item[0]))
    kept = [(word, count) for word, count in ranked[:vocabulary] if count >= minimum]
    if not kept:
        raise InputError(f"{files[0].parent}: no word occurs {minimum} times: add texts, or lower minimum")
    numbers = {word: number for number, (word, _) in enumerate(kept)}
    shares = np.array([count for _, count in kept]) / sum(counter.values())
    chances = np.ones(len(kept)) if subsample is None else np.sqrt(subsample / shares) + subsample / shares
    count = 0
    with (folder / "words.bin").open("wb") as out:
        for place, file in enumerate(files):
            random = np.random.RandomState(derive(VERSION, "subsample", place) % 2**32)
            for piece in pieces(file, damaged):
                found = np.array([numbers[word] for word in words_of(piece) if word in numbers], DTYPE)
                found = found[random.random_sample(len(found)) < chances[found]]
                out.write(found.tobytes())
                count += len(found)
    about = {"words": [word for word, _ in kept], "counts": [count for _, count in kept], "count": count}
    (folder / "words.json").write_text(json.dumps(about, ensure_ascii=False))


def words_of(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _counted(files: list[Path], damaged: Damaged) -> Counter[str]:
    counter: Counter[str] = Counter()
    rare = 1
    for file in files:
        for piece in pieces(file, damaged):
            counter.update(words_of(piece))
            while len(counter) > _MOST_COUNTED:
                counter = Counter({word: count for word, count in counter.items() if count > rare})
                rare += 1
    return counter
