"""All kinds of dropout are switched off, of torch and of other libraries."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.proof.reference.dropout import disable_dropout


class DropPath(nn.Module):
    """Stochastic depth as other libraries implement it."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        keep = torch.rand(x.shape[0], 1) >= self.drop_prob
        return x * keep


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn_dropout = 0.3
        self.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.scale, self.attn_dropout, self.training)


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Dropout(0.5)
        self.alpha = nn.AlphaDropout(0.2)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
        self.recurrent = nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True)
        self.path = DropPath(0.5)
        self.functional = Functional()

    def forward(self, x: Tensor) -> Tensor:
        x = self.alpha(self.plain(self.path(x))).unsqueeze(1)
        x = self.recurrent(self.attention(x, x, x)[0])[0]
        out: Tensor = self.functional(x)
        return out


def test_training_is_deterministic_without_dropout() -> None:
    model = Everything().train()
    x = torch.randn(16, 4)
    assert not torch.equal(model(x), model(x))
    assert disable_dropout(model) == 6
    assert torch.equal(model(x), model(x))
    assert model.functional.scale == 0.5, "other numbers are left alone"
    assert model.training


def test_a_model_without_dropout_is_unchanged() -> None:
    assert disable_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0))) == 0
