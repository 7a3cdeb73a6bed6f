"""Generated text files for machines without data. They are in a language of 64 words, in which one word nearly always
determines the next. Models of bytes, of masked bytes and of neighbouring words can learn it."""

from pathlib import Path

import numpy as np

from meshwright.data.order import derive_seed
from meshwright.errors import InputError
from meshwright.files.cache import cache_folder, fill_once

VERSION = 1  # part of the names of cached folders: raise it when the generated text changes
WORDS, NOISE = 64, 0.1
# The number of the next word is an affine map of that of a word. The map visits all words before it repeats, because
# WORDS is a power of two.
FACTOR, SHIFT = 5, 3


def generated_word(number: int) -> str:
    """Returns the word with this number, which must be below WORDS. Words have three letters; word 0 is `bad`."""
    consonants, vowels = "bdgklmnp", "aeiouyäö"
    return consonants[number % 8] + vowels[number // 8 % 8] + consonants[(3 * number + 1) % 8]


def generated_text(seed: int, words: int) -> str:
    """Returns a text of `words` words, ten per line. A share NOISE of them is random instead of following the rule."""
    random = np.random.RandomState(derive_seed(seed, "text") % 2**32)
    random_words = random.randint(0, WORDS, words).tolist()
    rule_breaks = (random.random_sample(words) < NOISE).tolist()
    numbers = random_words[:1]
    for random_word, breaks_rule in zip(random_words[1:], rule_breaks[1:], strict=True):
        numbers.append(random_word if breaks_rule else (FACTOR * numbers[-1] + SHIFT) % WORDS)
    lines = (numbers[begin : begin + 10] for begin in range(0, words, 10))
    return "".join(" ".join(generated_word(number) for number in line) + "\n" for line in lines)


def write_texts(folder: Path, documents: int, words: int) -> None:
    for number in range(documents):
        (folder / f"{number:04}.txt").write_text(generated_text(number, words), encoding="utf-8")


def generated_texts(documents: int = 200, words: int = 500) -> Path:
    """Returns the folder of the generated text files, and writes them if they are not in the cache."""
    name = f"texts-{VERSION}-{documents}x{words}"
    return fill_once(cache_folder() / "synthetic" / name, lambda folder: write_texts(folder, documents, words))


def missing_data_error(expected_files: str) -> InputError:
    """Returns the error for a data set without a folder. `expected_files` describes the files that the data set
    reads."""
    return InputError(
        f"there is no data: set the folder with {expected_files} by --set data.root=FOLDER, or generate some with "
        "--set data.synthetic=true"
    )
