"""Integers with a scale a row stay close to the weights, and who looks for neighbours finds the same ones."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.export.quantize import quantize
from meshwright.export.rows import RowEmbedding, held, keep_as_rows, quantized, restored
from meshwright.workloads.text.decoder import Decoder


def nearest(table: Tensor) -> Tensor:
    """For each row the other one with the largest cosine."""
    unit = F.normalize(table.double(), dim=1)
    alike = unit @ unit.T
    return alike.fill_diagonal_(-2).argmax(dim=1)


def kept_neighbours(table: Tensor) -> float:
    return float((nearest(table) == nearest(restored(*quantized(table, torch.int16)))).double().mean())


def test_int16_keeps_the_neighbours_of_random_rows() -> None:
    assert kept_neighbours(torch.randn(5000, 64, generator=torch.Generator().manual_seed(0))) >= 0.99


def test_int16_keeps_the_neighbours_in_a_decoders_embedding() -> None:
    torch.manual_seed(0)
    model = Decoder(layers=1, hidden=64, heads=4, sequence=16, vocabulary=3000)
    shrunk = quantize(model, "int16")
    assert isinstance(shrunk.embedding, RowEmbedding)
    same = nearest(model.embedding.weight.detach()) == nearest(shrunk.embedding.weight)
    assert float(same.double().mean()) >= 0.99


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
@pytest.mark.parametrize("shape", [(7, 5), (4, 3, 3, 3), (6,)])
def test_no_value_is_off_by_more_than_half_a_scale(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape) * 10 ** torch.randn(shape[0], *[1] * (len(shape) - 1))
    weight[0] = 0
    rows, scale = quantized(weight, dtype)
    assert rows.dtype == dtype
    assert bool(((restored(rows, scale) - weight).abs() <= 0.5001 * scale).all())
    assert not restored(rows, scale)[0].any()


def test_a_tied_weight_is_kept_once() -> None:
    model = Decoder(layers=1, hidden=8, heads=2, sequence=4, vocabulary=20)
    shrunk = quantize(model, "int16")
    rows = [value for name, value in shrunk.state_dict().items() if name.endswith("rows") and value.shape[0] == 20]
    assert len(rows) == 2
    assert rows[0].data_ptr() == rows[1].data_ptr()
    tokens = torch.randint(20, (3, 4))
    torch.testing.assert_close(shrunk(tokens), model(tokens), rtol=1e-3, atol=1e-4)
    assert model.head.weight is model.embedding.weight  # the model itself is left alone


def test_other_embeddings_are_read_as_a_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(9, 4))
    before = model(torch.tensor([[1, 2], [3, 4]]))
    keep_as_rows(model, held(model), torch.int16)
    torch.testing.assert_close(model(torch.tensor([[1, 2], [3, 4]])), before, rtol=1e-3, atol=1e-4)
