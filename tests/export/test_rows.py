"""Integer rows stay close to the weights, and nearest neighbours among embeddings stay the same."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.export.quantize import quantize
from meshwright.export.rows import (
    RowEmbedding,
    dequantize_rows,
    parameters_with_uses,
    quantize_rows,
    store_as_integer_rows,
)
from meshwright.workloads.text.decoder import Decoder


def nearest(table: Tensor) -> Tensor:
    """For each row, the index of the other row with the largest cosine similarity."""
    unit = F.normalize(table.double(), dim=1)
    similarity = unit @ unit.T
    return similarity.fill_diagonal_(-2).argmax(dim=1)


def share_of_unchanged_neighbours(table: Tensor) -> float:
    return float((nearest(table) == nearest(dequantize_rows(*quantize_rows(table, torch.int16)))).double().mean())


def test_int16_keeps_the_neighbours_of_random_rows() -> None:
    assert share_of_unchanged_neighbours(torch.randn(5000, 64, generator=torch.Generator().manual_seed(0))) >= 0.99


def test_int16_keeps_the_neighbours_in_a_decoders_embedding() -> None:
    torch.manual_seed(0)
    model = Decoder(layers=1, hidden=64, heads=4, sequence=16, vocabulary=3000)
    quantized = quantize(model, "int16")
    assert isinstance(quantized.embedding, RowEmbedding)
    same = nearest(model.embedding.weight.detach()) == nearest(quantized.embedding.weight)
    assert float(same.double().mean()) >= 0.99


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
@pytest.mark.parametrize("shape", [(7, 5), (4, 3, 3, 3), (6,)])
def test_the_error_of_every_value_is_at_most_half_the_scale(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape) * 10 ** torch.randn(shape[0], *[1] * (len(shape) - 1))
    weight[0] = 0
    rows, scale = quantize_rows(weight, dtype)
    assert rows.dtype == dtype
    assert bool(((dequantize_rows(rows, scale) - weight).abs() <= 0.5001 * scale).all())
    assert not dequantize_rows(rows, scale)[0].any()


def test_a_tied_weight_is_stored_once() -> None:
    model = Decoder(layers=1, hidden=8, heads=2, sequence=4, vocabulary=20)
    quantized = quantize(model, "int16")
    rows = [value for name, value in quantized.state_dict().items() if name.endswith("rows") and value.shape[0] == 20]
    assert len(rows) == 2
    assert rows[0].data_ptr() == rows[1].data_ptr()
    tokens = torch.randint(20, (3, 4))
    torch.testing.assert_close(quantized(tokens), model(tokens), rtol=1e-3, atol=1e-4)
    assert model.head.weight is model.embedding.weight  # the original model is not changed


def test_other_kinds_of_embeddings_are_dequantized_as_a_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(9, 4))
    before = model(torch.tensor([[1, 2], [3, 4]]))
    store_as_integer_rows(model, parameters_with_uses(model), torch.int16)
    torch.testing.assert_close(model(torch.tensor([[1, 2], [3, 4]])), before, rtol=1e-3, atol=1e-4)
