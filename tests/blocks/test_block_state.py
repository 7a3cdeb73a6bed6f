"""Blocks whose forward pass changes buffers or attributes train the same with and without recomputation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.blocks.recompute import Recompute, recompute_blocks
from meshwright.errors import InputError

WIDTH = 6


class Block(nn.Module):
    """Its forward pass depends on what `change` makes of its state."""

    scale: Tensor
    unset: Tensor | None
    added: float
    penalty: Tensor

    def __init__(self, change: Callable[["Block"], Any], elements: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.InstanceNorm1d(WIDTH, track_running_stats=True)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.hooked = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.change = change
        self.register_buffer("scale", torch.ones(elements))
        self.register_buffer("unset", None)
        self.calls = 1
        self.moving = torch.ones(1)

    def forward(self, x: Tensor) -> Tensor:
        factor = self.change(self)
        y: Tensor = self.norm(torch.tanh(self.linear(x)) / factor)
        return x + self.hooked(torch.tanh(self.spectral(y)))


def written(block: Block) -> Any:
    block.scale += 1
    return block.scale.mean()


def replaced(block: Block) -> Any:
    block.scale = block.scale + 1
    return block.scale.mean()


def filled(block: Block) -> Any:
    block.unset = torch.full((1,), 2.0) if block.unset is None else block.unset + 1
    return block.unset


def counted(block: Block) -> Any:
    block.calls += 1
    return block.calls


def attribute_written(block: Block) -> Any:
    block.moving.mul_(1.5)
    return block.moving.mean()


def attribute_added(block: Block) -> Any:
    if not hasattr(block, "added"):
        block.added = 3.0
        return 1.0
    block.added += 1
    return block.added


def every_third(block: Block) -> Any:
    block.calls += 1
    if block.calls % 3 == 0:
        block.scale.add_(1)
    return block.scale.mean()


def left_for_others(block: Block) -> Any:
    block.penalty = block.linear.weight.square().sum()
    return 2.0


def state_after_steps(change: Callable[[Block], Any], kind: Recompute, elements: int = 1) -> dict[str, Any]:
    """Makes four steps of two forward passes each, and returns weights, buffers and attributes."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(change, elements), Block(change, elements))
    model[1].scale = model[0].scale  # a buffer that two blocks share
    recompute_blocks(model, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(2, 3, WIDTH, WIDTH, generator=torch.Generator().manual_seed(step))
        sum(model(part).square().sum() for part in x).backward()
        optimizer.step()
    attributes = {f"{n}.{k}": v for n, b in model.named_children() for k, v in b.__dict__.items() if k != "change"}
    values = {k: v for k, v in attributes.items() if isinstance(v, int | float | Tensor)}
    return {**model.state_dict(), **values}


CHANGES = (written, replaced, filled, counted, attribute_written, attribute_added, every_third, left_for_others)


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_recomputation_sees_and_leaves_what_the_first_pass_did(
    change: Callable[[Block], Any], kind: Recompute
) -> None:
    expected, recomputed = state_after_steps(change, "none"), state_after_steps(change, kind)
    assert recomputed.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(recomputed[name]), torch.as_tensor(value)), name


def test_a_large_buffer_that_changes_is_kept_and_one_that_changes_later_is_refused() -> None:
    expected, recomputed = (state_after_steps(written, kind, elements=2**15) for kind in ("none", "full"))
    assert torch.equal(recomputed["0.scale"], expected["0.scale"])
    assert torch.equal(recomputed["0.linear.weight"], expected["0.linear.weight"])
    with pytest.raises(InputError, match=r"writes to the tensor scale of [01] .*: set memory.recompute to none"):
        state_after_steps(every_third, "full", elements=2**15)
