import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.data.randomness import seed_generators
from meshwright.errors import InputError
from meshwright.workloads.text.word_contexts import words
from tests.workloads.text.shares import assert_independent_of_ranks, load_global_batches


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield


@pytest.fixture
def root(tmp_path: Path) -> str:
    """A text that repeats twenty words in a fixed order, so that the neighbours of a word are known."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one").write_text(" ".join(f"w{number % 20:02}" for number in range(4001)))
    return str(tmp_path / "texts")


KEYWORDS: dict[str, Any] = {"minimum": 1, "window": 3, "negatives": 4, "centers": 10, "subsample": None}


def test_neighbours_are_within_the_window_and_negatives_are_other_words(root: str) -> None:
    dataset = words(root=root, **KEYWORDS)
    distances = []
    for index in range(200):
        seed_generators(index)
        centers, contexts, targets = dataset[index]
        assert (centers.shape, contexts.shape, targets.shape) == ((10,), (10, 5), (10, 5))
        assert targets.tolist() == [[1, 0, 0, 0, 0]] * 10
        assert not (contexts[:, 1:] == contexts[:, :1]).any()
        distances += ((contexts[:, 0] - centers + 10) % 20 - 10).abs().tolist()
    shares = np.bincount(distances, minlength=4) / len(distances)
    assert shares[0] == 0
    assert len(shares) == 4
    assert shares[1:].tolist() == pytest.approx([11 / 18, 5 / 18, 2 / 18], abs=0.03)  # nearer ones more often


def test_negatives_are_drawn_by_a_power_of_their_frequency(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one").write_text("a b " * 800 + "a c " * 100)
    dataset = words(root=str(tmp_path / "texts"), **{**KEYWORDS, "negatives": 200})
    drawn = np.diff(dataset.cumulative_probabilities, prepend=0)
    expected = np.array([900, 800, 100]) ** 0.75
    assert drawn.tolist() == pytest.approx((expected / expected.sum()).tolist())


def test_contexts_are_a_function_of_seed_epoch_and_sample(root: str) -> None:
    dataset = words(root=root, **KEYWORDS)
    assert_independent_of_ranks(dataset)
    first, second = load_global_batches(dataset, 1)[:1], load_global_batches(dataset, 1, start=(1, 0))[:1]
    assert not torch.equal(first[0][1], second[0][1])


def test_train_and_val_have_no_common_sample(root: str) -> None:
    train, val = words(root=root, **KEYWORDS), words("val", root=root, **KEYWORDS)
    assert sorted([*train.samples, *val.samples]) == list(range(400))
    assert len(val) == 8


def test_words_are_memory_mapped_and_the_map_is_not_pickled(root: str) -> None:
    dataset = words(root=root, **KEYWORDS)
    before = len(pickle.dumps(dataset))
    dataset[0]
    assert isinstance(dataset._mapped_words(), np.memmap)
    assert len(pickle.dumps(dataset)) == before


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"split": "test"}, "split is 'test'"),
        ({"window": 0}, "window is 0"),
        ({"centers": 3000}, "4001 words, 20 diff"),
    ],
)
def test_wrong_arguments_are_input_errors(root: str, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        words(root=root, **{**KEYWORDS, **keywords})


def test_the_error_for_missing_data_names_both_remedies() -> None:
    with pytest.raises(InputError, match=r"with text files by --set data\.root=FOLDER, or .*data\.synthetic=true"):
        words()
    assert len(words(synthetic=True).corpus.words) == 64
