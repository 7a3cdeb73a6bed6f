"""Builds a corpus of word numbers from a folder of texts: `words.bin` holds the number of every word of the texts in
order, `words.json` holds the vocabulary. Both are written to the cache folder once, and again when the texts change.

Texts are streamed twice, once to count the words and once to number them. Only the vocabulary is held in memory.
"""

import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.data.order import derive_seed
from meshwright.errors import InputError
from meshwright.files.cache import cache_folder, fill_once
from meshwright.workloads.text.text_files import DamagePolicy, text_files, text_pieces

DTYPE = np.dtype("<u4")
VERSION = 1  # of the cached files: raise it when their content changes
_WORD = re.compile(r"\w+")
_MAX_COUNTED_WORDS = 5_000_000  # with more different words, the rarest are dropped while counting


@dataclass(frozen=True)
class Corpus:
    """A corpus of word numbers. `words` is the vocabulary from the most frequent word to the rarest, and `counts` is
    how often each word occurs in the texts. `path` is the file of word numbers, and `count` is how many numbers it
    holds."""

    path: Path
    words: tuple[str, ...]
    counts: tuple[int, ...]
    count: int


def load_corpus(texts: Path, vocabulary: int, minimum: int, subsample: float | None, damaged: DamagePolicy) -> Corpus:
    """Returns the corpus of a folder of texts, and builds it if it is not in the cache.

    The vocabulary has at most `vocabulary` words, each of which occurs at least `minimum` times; other words are
    dropped. Occurrences of a word that makes up more than the share `subsample` of the text are dropped at random, the
    more of them the more frequent the word is (Mikolov et al. 2013, by the formula of their program). None drops none.
    """
    files = text_files(texts)
    settings = [VERSION, vocabulary, minimum, subsample, damaged, str(texts.resolve())]
    file_states = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = hashlib.blake2b(json.dumps([settings, file_states]).encode(), digest_size=16).hexdigest()

    def write(folder: Path) -> None:
        _write_corpus(folder, files, vocabulary, minimum, subsample, damaged)

    folder = fill_once(cache_folder() / "words" / key, write)
    content = json.loads((folder / "words.json").read_text())
    return Corpus(folder / "words.bin", tuple(content["words"]), tuple(content["counts"]), content["count"])


def _write_corpus(
    folder: Path, files: list[Path], vocabulary: int, minimum: int, subsample: float | None, damaged: DamagePolicy
) -> None:
    counter = _count_words(files, damaged)
    # Equally frequent words are sorted by their letters, so the order of the files does not matter.
    ranked = sorted(counter.items(), key=lambda item: (-item[1], item[0]))
    frequent = [(word, count) for word, count in ranked[:vocabulary] if count >= minimum]
    if not frequent:
        raise InputError(f"{files[0].parent}: no word occurs {minimum} times: add texts, or lower minimum")
    numbers = {word: number for number, (word, _) in enumerate(frequent)}
    shares = np.array([count for _, count in frequent]) / sum(counter.values())
    probabilities = np.ones(len(frequent)) if subsample is None else np.sqrt(subsample / shares) + subsample / shares
    total = 0
    with (folder / "words.bin").open("wb") as out:
        for index, file in enumerate(files):
            random = np.random.RandomState(derive_seed(VERSION, "subsample", index) % 2**32)
            for piece in text_pieces(file, damaged):
                word_numbers = np.array([numbers[word] for word in split_words(piece) if word in numbers], DTYPE)
                word_numbers = word_numbers[random.random_sample(len(word_numbers)) < probabilities[word_numbers]]
                out.write(word_numbers.tobytes())
                total += len(word_numbers)
    content = {"words": [word for word, _ in frequent], "counts": [count for _, count in frequent], "count": total}
    (folder / "words.json").write_text(json.dumps(content, ensure_ascii=False))


def split_words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _count_words(files: list[Path], damaged: DamagePolicy) -> Counter[str]:
    counter: Counter[str] = Counter()
    dropped_count = 1
    for file in files:
        for piece in text_pieces(file, damaged):
            counter.update(split_words(piece))
            while len(counter) > _MAX_COUNTED_WORDS:
                counter = Counter({word: count for word, count in counter.items() if count > dropped_count})
                dropped_count += 1
    return counter
