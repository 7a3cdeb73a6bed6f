from typing import Any

import pytest
import torch

from meshwright.errors import InputError
from meshwright.workloads.towers import Tower, TwoTowers


def test_each_vector_is_the_output_of_its_tower() -> None:
    torch.manual_seed(0)
    model = TwoTowers(50, 8, (16,), 4, document_vocabulary=90, document_layers=(12, 6))
    query, document = torch.randint(1, 50, (3, 5)), torch.randint(1, 90, (3, 7))
    vectors = model(query, document)
    assert torch.equal(vectors[0], model.query(query))
    assert torch.equal(vectors[1], model.document(document))
    assert [tuple(v.shape) for v in vectors] == [(3, 4), (3, 4)]
    for vector in vectors:
        assert torch.allclose(vector.norm(dim=1), torch.ones(3))
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {"query", "document"}
    assert model.document.words.weight.shape == (90, 8)
    assert len(model.document.layers) == 5


def test_padding_does_not_change_the_output() -> None:
    torch.manual_seed(0)
    tower = Tower(50, 8, (16,), 4)
    torch.nn.init.normal_(tower.words.weight)  # also where the row of the padding is not zero
    text = torch.randint(1, 50, (2, 5))
    assert torch.allclose(tower(torch.nn.functional.pad(text, (0, 3))), tower(text), atol=1e-6)
    assert torch.isfinite(tower(torch.zeros(2, 5, dtype=torch.int64))).all()


@pytest.mark.parametrize(("keywords", "words"), [({"dim": 0}, "dim is 0"), ({"layers": [4, -1]}, "layers is -1")])
def test_a_wrong_argument_is_an_input_error(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        TwoTowers(50, **keywords)
