from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshwright.errors import InputError
from meshwright.parallel.weights.initialize import initialize_model
from meshwright.workloads.text.encoder import Encoder, MaskedLanguage

SMALL: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 16, "vocabulary": 50, "dropout": 0.0}


def text() -> torch.Tensor:
    return torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(1))


def test_bert_base_has_the_published_number_of_parameters() -> None:
    """bert-base-uncased with its masked-language head has 109,514,298 parameters, including two segment embeddings."""
    with torch.device("meta"):
        model = MaskedLanguage()
    assert sum(p.numel() for p in model.parameters()) == 109_514_298 - 2 * 768


def test_every_token_attends_to_every_other() -> None:
    torch.manual_seed(0)
    model, before = Encoder(**SMALL), text()
    after = before.clone()
    after[:, 9] = (after[:, 9] + 1) % 50
    changed = (model(before) - model(after)).abs().amax(-1)
    assert (changed > 1e-6).all()


def test_a_block_computes_its_formula() -> None:
    torch.manual_seed(0)
    block: Any = Encoder(**SMALL).blocks[0]
    x = torch.randn(2, 5, 32)
    q, k, v = (block.attention.get_submodule(name)(x).view(2, 5, 4, 8).transpose(1, 2) for name in "qkv")
    mixed = ((q @ k.transpose(-1, -2) / 8**0.5).softmax(-1) @ v).transpose(1, 2).reshape(2, 5, 32)
    first = F.layer_norm(x + block.attention.o(mixed), (32,))
    wide = F.gelu(block.feedforward.up(first), approximate="tanh")
    assert torch.allclose(block(x), F.layer_norm(first + block.feedforward.down(wide), (32,)), atol=1e-5)


def test_the_head_shares_the_weight_of_the_embedding() -> None:
    model = MaskedLanguage(**SMALL)
    assert model.head.weight is model.encoder.embedding.weight
    assert model(text()).shape == (2, 12, 50)
    start = initialize_model(lambda: MaskedLanguage(**SMALL), seed=1).requires_grad_(False)
    assert float(start.get_parameter("head.bias").abs().max()) == 0
    assert float(start.get_parameter("encoder.embedding.weight").std()) == pytest.approx(0.02, rel=0.1)
    assert float(start(text()).abs().max()) < 1  # no word is preferred before training


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"hidden": 30}, r"hidden\(30\) is not divisible by heads\(4\)"),
        ({"layers": 0}, "the encoder's layers is 0"),
        ({"sequence": 4}, "12 tokens long, but the model has positions for sequence = 4"),
    ],
)
def test_a_wrong_argument_is_an_input_error(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        MaskedLanguage(**{**SMALL, **keywords})(text())
