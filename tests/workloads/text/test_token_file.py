import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.errors import InputError
from meshwright.workloads.text.text_generated import generated_text
from meshwright.workloads.text.token_build import build_tokens
from meshwright.workloads.text.token_file import IGNORED, tokens, verify_tokens


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of token files: the bytes 0 to 99, and the token that ends the document."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one").write_bytes(bytes(range(100)))
    build_tokens(tmp_path / "texts", tmp_path, validation=0)
    return tmp_path


def test_windows_are_consecutive_and_targets_are_the_next_tokens(root: Path) -> None:
    dataset = tokens(root=str(root), sequence=10)
    assert len(dataset) == 10  # the 101st token is the last one's target
    inputs, targets = dataset[3]
    assert (inputs.tolist(), targets.tolist()) == (list(range(30, 40)), list(range(31, 41)))
    assert inputs.dtype == targets.dtype == torch.int64
    assert dataset[9][1][-1] == 256
    assert len(tokens(root=str(root), sequence=10, limit=4)) == 4
    with pytest.raises(IndexError):
        dataset[10]


def test_tokens_are_memory_mapped_and_the_map_is_not_pickled(root: Path) -> None:
    dataset = tokens(root=str(root), sequence=10)
    before = len(pickle.dumps(dataset))
    dataset[0]
    assert isinstance(dataset._mapped_tokens(), np.memmap)
    assert len(pickle.dumps(dataset)) == before
    assert torch.equal(pickle.loads(pickle.dumps(dataset))[5][0], dataset[5][0])


def test_generated_tokens_are_files_that_the_same_loader_reads() -> None:
    dataset, evaluation = tokens(synthetic=True, sequence=64), tokens("val", synthetic=True, sequence=64)
    again = tokens(root=str(dataset.file.path.parent), sequence=64)
    assert torch.equal(again[7][0], dataset[7][0])
    assert bytes(dataset[0][0].tolist()).decode(errors="ignore") in generated_text(0, 500)
    assert len(dataset) > 8 * len(evaluation) > 0
    verify_tokens(dataset.file.path.parent, dataset.file.path.stem)


def test_the_error_for_missing_data_names_both_remedies() -> None:
    with pytest.raises(InputError, match=r"train\.bin and train\.json.*data\.root=FOLDER.*data\.synthetic=true"):
        tokens()


def test_a_file_with_a_larger_vocabulary_than_the_model_is_refused(root: Path) -> None:
    with pytest.raises(InputError, match="vocabulary of 258, but the model has one of 257"):
        tokens(root=str(root), sequence=10, vocabulary=257)
    tokens(root=str(root), sequence=10, vocabulary=258)


def test_the_error_for_a_missing_split_names_the_existing_ones(root: Path) -> None:
    with pytest.raises(InputError, match=r"val\.json: there is no such file; the folder has train"):
        tokens("val", root=str(root))
    (root / "train.bin").unlink()
    with pytest.raises(InputError, match=r"train\.bin: there is no such file, although train\.json exists"):
        tokens(root=str(root))


@pytest.mark.parametrize(
    ("keywords", "words"),
    [({"sequence": 0}, "sequence is 0"), ({"limit": 0}, "limit is 0"), ({"sequence": 101}, "101 tokens, too few")],
)
def test_a_wrong_argument_is_an_input_error(root: Path, keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        tokens(root=str(root), **keywords)


@pytest.mark.parametrize("content", ["{", "{}", '{"dtype": "float32"}', "[]"])
def test_a_damaged_description_is_an_input_error(root: Path, content: str) -> None:
    (root / "train.json").write_text(content)
    with pytest.raises(InputError, match=r"train\.json: does not describe a token file"):
        tokens(root=str(root))


def test_a_truncated_file_is_an_error_or_its_remaining_windows_are_used(root: Path) -> None:
    file = root / "train.bin"
    file.write_bytes(file.read_bytes()[:101])
    with pytest.raises(InputError, match=f"{file}: holds 101 bytes, not the 202"):
        tokens(root=str(root), sequence=10)
    with pytest.warns(UserWarning, match=f"{file}: holds 101 bytes"):
        dataset = tokens(root=str(root), sequence=10, damaged="skip")
    assert len(dataset) == 4


def test_a_token_outside_the_vocabulary_is_an_error_or_its_window_is_ignored_by_the_loss(root: Path) -> None:
    file = root / "train.bin"
    raw = np.fromfile(file, "<u2")
    raw[[35, 60]] = 999
    raw.tofile(file)
    with pytest.raises(InputError, match=f"{file}: token 35 is 999, but its vocabulary has 258"):
        tokens(root=str(root), sequence=10)[3]
    dataset = tokens(root=str(root), sequence=10, damaged="skip")
    with pytest.warns(UserWarning, match="token 35 is 999") as caught_warnings:
        (inputs, targets), (_, before), (_, after) = (dataset[index] for index in (3, 5, 6))
    assert len(caught_warnings) == 1
    assert before.tolist() == after.tolist() == [IGNORED] * 10  # token 60 is the last target of window 5
    assert int(inputs.max()) < 258
    assert targets.tolist() == [IGNORED] * 10
    assert dataset[0][1].tolist() == list(range(1, 11))


def test_a_changed_byte_is_found_by_the_checksum(root: Path) -> None:
    verify_tokens(root, "train")
    raw = np.fromfile(root / "train.bin", "<u2")
    raw[50] += 1
    raw.tofile(root / "train.bin")
    with pytest.raises(InputError, match="its checksum is"):
        verify_tokens(root, "train")
