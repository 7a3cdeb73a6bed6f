"""Blocks that are recomputed do not put keys into a cache twice."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from meshwright.blocks.recompute import recompute_blocks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: list[Tensor] | None) -> Tensor:
        keys = self.keys(x)
        if cache is not None:
            cache.append(keys)
            keys = torch.cat(cache)
        return x + (x @ keys.T).softmax(-1) @ keys


class Cached(nn.Module):
    """Keeps keys for generating text unless its configuration says otherwise, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, [] if self.config.use_cache else None)
        return x


def test_a_recomputed_model_keeps_no_keys_for_generation() -> None:
    torch.manual_seed(0)
    model, x = Cached(), torch.randn(3, 4)
    model(x).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    recompute_blocks(model, "full")
    model(x).sum().backward()
    assert not model.config.use_cache
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
