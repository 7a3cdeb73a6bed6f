"""Text with a rule in it, for machines without any: a made-up language whose words nearly always follow one another in
a fixed way, so that a model of letters, of masked letters or of neighbouring words has something to learn."""

from pathlib import Path

import numpy as np

from meshwright.cache import cache_folder, made_once
from meshwright.data.order import derive
from meshwright.errors import InputError

VERSION = 1  # part of the names of cached files: raise it with every change of what is generated
WORDS, NOISE = 64, 0.1
# An affine map that visits all words before it repeats, as WORDS is a power of two.
FACTOR, SHIFT = 5, 3


def word(number: int) -> str:
    """Three letters, another for each number below WORDS: word 0 is `bad`."""
    consonants, vowels = "bdgklmnp", "aeiouyäö"
    return consonants[number % 8] + vowels[number // 8 % 8] + consonants[(3 * number + 1) % 8]


def text(seed: int, words: int) -> str:
    """So many words, ten a line. A share NOISE of them follows no rule."""
    random = np.random.RandomState(derive(seed, "text") % 2**32)
    drawn = random.randint(0, WORDS, words).tolist()
    surprises = (random.random_sample(words) < NOISE).tolist()
    made = drawn[:1]
    for fresh, surprise in zip(drawn[1:], surprises[1:], strict=True):
        made.append(fresh if surprise else (FACTOR * made[-1] + SHIFT) % WORDS)
    lines = (made[begin : begin + 10] for begin in range(0, words, 10))
    return "".join(" ".join(word(number) for number in line) + "\n" for line in lines)


def write_texts(folder: Path, documents: int, words: int) -> None:
    for number in range(documents):
        (folder / f"{number:04}.txt").write_text(text(number, words), encoding="utf-8")


def generated_texts(documents: int = 200, words: int = 500) -> Path:
    """The folder with the generated text files, made by the first process that asks."""
    name = f"texts-{VERSION}-{documents}x{words}"
    return made_once(cache_folder() / "synthetic" / name, lambda folder: write_texts(folder, documents, words))


def no_data(wanted: str) -> InputError:
    """What a data set says that was given no folder. `wanted`: the files it would read."""
    return InputError(
        f"there is no data: set the folder with {wanted} by --set data.root=FOLDER, or generate some with "
        "--set data.synthetic=true"
    )
