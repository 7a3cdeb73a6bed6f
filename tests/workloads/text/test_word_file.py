from pathlib import Path

import numpy as np
import pytest

from meshwright.errors import InputError
from meshwright.workloads.text import word_file
from meshwright.workloads.text.word_file import Corpus, load_corpus


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "one.txt").write_text("The cat, the dog.\nThe häuser rare cat")
    (folder / "two.txt").write_text("dog the häuser")
    return folder


def read_words(corpus: Corpus) -> list[str]:
    return [corpus.words[number] for number in np.fromfile(corpus.path, "<u4")]


def test_words_are_ranked_by_frequency_and_rare_ones_dropped(texts: Path) -> None:
    corpus = load_corpus(texts, vocabulary=10, minimum=2, subsample=None, damaged="fatal")
    assert corpus.words == ("the", "cat", "dog", "häuser")
    assert corpus.counts == (4, 2, 2, 2)
    assert read_words(corpus) == ["the", "cat", "the", "dog", "the", "häuser", "cat", "dog", "the", "häuser"]
    assert corpus.count == 10
    few = load_corpus(texts, vocabulary=2, minimum=1, subsample=None, damaged="fatal")
    assert read_words(few) == ["the", "cat", "the", "the", "cat", "the"]


def test_the_corpus_is_built_once_and_again_when_the_texts_change(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_corpus(texts, 10, 1, None, "fatal")
    with monkeypatch.context() as patch:
        patch.setattr(word_file, "_write_corpus", lambda *_: pytest.fail("the corpus was built again"))
        assert load_corpus(texts, 10, 1, None, "fatal") == first
    (texts / "three.txt").write_text("bird")
    assert "bird" in load_corpus(texts, 10, 1, None, "fatal").words


def test_frequent_words_are_subsampled(texts: Path) -> None:
    (texts / "three.txt").write_text("common " * 9_000 + "seldom " * 1_000)
    corpus = load_corpus(texts, 10, 100, 0.01, "fatal")
    share, subsample = 9_000 / 10_011, 0.01
    words = read_words(corpus)
    assert words.count("common") / 9_000 == pytest.approx((subsample / share) ** 0.5 + subsample / share, rel=0.1)
    assert words.count("seldom") / 1_000 > 3 * words.count("common") / 9_000
    assert load_corpus(texts, 10, 100, 0.01, "fatal") == corpus


def test_memory_for_counting_words_is_bounded(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (texts / "three.txt").write_text(" ".join(f"w{number}" for number in range(200)))
    monkeypatch.setattr(word_file, "_MAX_COUNTED_WORDS", 20)
    assert load_corpus(texts, 10, 2, None, "fatal").words[0] == "the"


def test_a_damaged_line_is_an_error_or_skipped_with_a_warning(texts: Path) -> None:
    (texts / "zz").write_bytes(b"fine fine\nbroken \xff\n")
    with pytest.raises(InputError, match="zz, line 2"):
        load_corpus(texts, 10, 1, None, "fatal")
    with pytest.warns(UserWarning, match="zz, line 2"):
        corpus = load_corpus(texts, 20, 1, None, "skip")
    assert "fine" in corpus.words
    assert "broken" not in corpus.words


def test_texts_without_frequent_words_are_an_input_error(texts: Path) -> None:
    with pytest.raises(InputError, match="no word occurs 9 times"):
        load_corpus(texts, 10, 9, None, "fatal")
