from typing import Any

import pytest
import torch

from meshwright.errors import InputError
from meshwright.workloads.text.tokens import FACTOR, SHIFT, tokens


def test_targets_are_the_next_tokens_and_follow_the_rule_except_for_noise() -> None:
    dataset: Any = tokens(sequence=2000, samples=3, noise=0.1)
    inputs, targets = dataset[2]
    assert (inputs.shape, targets.shape, inputs.dtype) == ((2000,), (2000,), torch.int64)
    assert torch.equal(inputs[1:], targets[:-1])
    rule_share = (targets == (FACTOR * inputs + SHIFT) % 256).float().mean()
    assert 0.85 < float(rule_share) < 0.95
    assert len(dataset) == 3
    with pytest.raises(IndexError):
        dataset[3]


def test_a_sample_is_a_function_of_seed_split_and_index() -> None:
    def first(**keywords: Any) -> Any:
        dataset: Any = tokens(sequence=32, **keywords)
        return dataset[0][0]

    assert torch.equal(first(), first(samples=10**12))
    assert not torch.equal(first(), first(split="test"))
    assert not torch.equal(first(), first(seed=1))


def test_tokens_stay_in_the_vocabulary() -> None:
    dataset: Any = tokens(sequence=500, vocabulary=10)
    assert int(dataset[0][0].max()) < 10


@pytest.mark.parametrize(
    ("keywords", "words"), [({"split": "val"}, "split is 'val'"), ({"sequence": 0}, "sequence is 0")]
)
def test_a_wrong_argument_is_an_input_error(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        tokens(**keywords)
