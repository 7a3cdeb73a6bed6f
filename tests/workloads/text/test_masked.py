from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.data.randomness import seed_generators
from meshwright.errors import InputError
from meshwright.workloads.text.masked import masked
from meshwright.workloads.text.token_build import build_tokens
from tests.workloads.text.shares import assert_independent_of_ranks, load_global_batches

MASK = 257


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one").write_text("x" * 40_000)
    build_tokens(tmp_path / "texts", tmp_path, validation=0)
    return tmp_path


def test_most_targets_are_masked_some_replaced_and_some_unchanged(root: Path) -> None:
    torch.manual_seed(0)
    inputs, targets = masked(root=str(root), sequence=39_000)[0]
    is_target = targets != -100
    assert float(is_target.float().mean()) == pytest.approx(0.15, abs=0.01)
    assert set(targets[is_target].tolist()) == {ord("x")}
    hidden, unchanged = inputs[is_target] == MASK, inputs[is_target] == ord("x")
    assert float(hidden.float().mean()) == pytest.approx(0.8, abs=0.02)
    assert float(unchanged.float().mean()) == pytest.approx(0.1, abs=0.02)
    replaced = inputs[is_target][~hidden & ~unchanged]
    assert len(replaced.unique()) > 100
    assert int(replaced.max()) < 258
    assert set(inputs[~is_target].tolist()) == {ord("x")}


def test_masks_are_a_function_of_seed_epoch_and_sample(root: Path) -> None:
    dataset = masked(root=str(root), sequence=2000)
    assert_independent_of_ranks(dataset)
    batches = load_global_batches(dataset, 1)
    half = len(batches) // 2
    epochs = [torch.cat([batch[1] for batch in epoch]) for epoch in (batches[:half], batches[half:])]
    assert not torch.equal(*((epoch != -100).sum(1).sort().values for epoch in epochs))


def test_masks_do_not_depend_on_the_default_dtype(root: Path) -> None:
    """Proofs compute in fp64."""
    dataset = masked(root=str(root), sequence=100)
    seed_generators(1)
    expected = dataset[0]
    torch.set_default_dtype(torch.float64)
    try:
        seed_generators(1)
        sample = dataset[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(sample[0], expected[0])


def test_without_a_mask_token_in_the_tokenizer_the_job_must_set_one(root: Path) -> None:
    description = root / "train.json"
    description.write_text(description.read_text().replace('"mask": 257', '"mask": null'))
    with pytest.raises(InputError, match=r"tokenizer bytes has no \[MASK\] or <mask>.*mask: NUMBER"):
        masked(root=str(root))
    assert (masked(root=str(root), sequence=1000, mask=5)[0][0] == 5).any()


def test_a_damaged_window_has_no_targets(root: Path) -> None:
    raw = np.fromfile(root / "train.bin", "<u2")
    raw[5] = 60_000
    raw.tofile(root / "train.bin")
    dataset = masked(root=str(root), sequence=100, damaged="skip")
    with pytest.warns(UserWarning, match="token 5 is 60000"):
        inputs, targets = dataset[0]
    assert set(targets.tolist()) == {-100}
    assert int(inputs.max()) < 258


@pytest.mark.parametrize(("keywords", "words"), [({"share": 0.0}, "share is 0.0"), ({"vocabulary": 9}, "has one of 9")])
def test_a_wrong_argument_is_an_input_error(root: Path, keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        masked(root=str(root), **keywords)


def test_the_error_for_missing_data_names_both_remedies() -> None:
    with pytest.raises(InputError, match=r"val\.bin.*data\.root=FOLDER.*data\.synthetic=true"):
        masked("val")
    assert len(masked("val", synthetic=True, sequence=64)) > 100
