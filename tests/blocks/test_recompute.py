"""Computing activations again changes nothing but the memory: not a bit of loss, gradients or running statistics."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.blocks import recompute
from meshwright.blocks.recompute import Recompute, find_blocks, recompute_blocks
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.profile.optimizer import OptimizerCost
from meshwright.profile.tracing.trace import profile
from meshwright.simulator.memory.peak import CUDA_MEMORY, predict_memory
from tests.profile.models import make, scores_loss, tiny_decoder

MODELS = ("gpt", "llama", "encoder", "resnet18")
KINDS: tuple[Recompute, ...] = ("selective", "full")
NOTHING = OptimizerCost(0.0, 0.0, False)


class Dropping(nn.Module):
    """Blocks with dropout and BatchNorm, whose statistics a second pass must not see."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5)) for _ in range(3))
        )
        self.blocks[0].register_module("1", nn.BatchNorm1d(8, momentum=None))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(x)
        return y


def two_steps(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(1)
    for _ in range(2):
        loss = run(model)
        loss.backward()
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients, **dict(model.named_buffers())}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*MODELS, "dropping"])
def test_a_step_is_the_same_to_the_bit(name: str, kind: Recompute) -> None:
    def fresh() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
        torch.manual_seed(0)
        if name == "dropping":
            x = torch.randn(6, 8)
            return Dropping(), lambda model: model(x).square().mean()
        model, batch, loss = make(name, batch=4)
        return model, lambda model: loss(model(batch[0]), batch[1])

    plain = two_steps(*fresh())
    model, run = fresh()
    recompute_blocks(model, kind)
    again = two_steps(model, run)
    assert plain.keys() == again.keys()
    for key, value in plain.items():
        assert torch.equal(value, again[key]), key


@pytest.mark.parametrize("name", ["gpt", "resnet18"])
def test_less_is_kept_and_more_is_computed(name: str) -> None:
    model, batch, loss = make(name)
    none, selective, full = (profile(model, batch, loss, recompute=k) for k in ("none", "selective", "full"))
    assert full.saved_bytes(8) < selective.saved_bytes(8) < none.saved_bytes(8)
    assert none.flops(8) == selective.flops(8) < full.flops(8)
    assert none.flops(8, "forward") == full.flops(8, "forward")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_equal_blocks_traced_once_need_what_all_of_them_do(name: str, kind: Recompute) -> None:
    model, batch, loss = make(name)
    once, all_of_them = (profile(model, batch, loss, recompute=kind, repeats=repeats) for repeats in (True, False))
    assert once.flops(8) == all_of_them.flops(8)
    peaks = [predict_memory(found, Plan(), 8, NOTHING, CUDA_MEMORY).allocated_bytes for found in (once, all_of_them)]
    assert peaks[0] == peaks[1]


def test_blocks_are_found_and_a_model_without_any_is_refused() -> None:
    assert find_blocks(make("resnet18")[0])[:3] == ("layer1.0", "layer1.1", "layer2.0")
    assert find_blocks(make("gpt")[0])[0] == "blocks.0"
    with pytest.raises(InputError, match=r"memory.recompute is full, but Linear has no blocks to compute again"):
        recompute_blocks(nn.Linear(2, 2), "full")


def test_what_is_split_is_told_also_where_recomputing_adds_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.11 does: two tensors of no size for every block."""

    def splits() -> list[tuple[str, str]]:
        model, tokens = tiny_decoder(layers=4), torch.zeros(2, 16, dtype=torch.long)
        found = profile(model, (tokens, tokens), scores_loss, recompute="full", structured=True)
        return [(one.layer, one.split) for part in found.stretches for one in part.operators if one.kind == "matmul"]

    def older(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        torch.empty((0,), requires_grad=True)
        torch.empty((0,))
        return checkpoint(function, *args, **kwargs)

    now = splits()
    assert any(split for _, split in now)
    monkeypatch.setattr(recompute, "checkpoint", older)
    assert splits() == now


def test_what_is_computed_again_is_no_gradient() -> None:
    model, tokens = tiny_decoder(layers=4), torch.zeros(2, 16, dtype=torch.long)

    def products(kind: Recompute, gradient: bool) -> int:
        found = profile(model, (tokens, tokens), scores_loss, recompute=kind)
        back = [part for part in found.stretches if part.phase == "backward"]
        return sum(part.count for part in back for o in part.operators if (o.kind, o.gradient) == ("matmul", gradient))

    assert products("none", False) == 0
    assert products("full", True) == products("none", True) > 0
    assert products("full", False) > 0
