"""Recomputing activations changes memory and nothing else: not a bit of loss, gradients or running statistics."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.blocks import recompute
from meshwright.blocks.recompute import Recompute, find_blocks, recompute_blocks
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.profile.equal_blocks import find_equal_blocks
from meshwright.profile.optimizer import OptimizerCost
from meshwright.profile.tracing.trace import trace_profile
from meshwright.profile.values import ModelProfile, SplitMark
from meshwright.simulator.memory.device_memory import CUDA_MEMORY
from meshwright.simulator.memory.peak import predict_memory
from tests.profile.models import scores_loss, small_model, tiny_decoder, tiny_llama, token_batch
from tests.soaked import all_but

MODELS = ("gpt", "llama", "encoder", "resnet18")
KINDS: tuple[Recompute, ...] = ("selective", "full")
NO_OPTIMIZER = OptimizerCost(0.0, 0.0, False)


class DropoutBatchNorm(nn.Module):
    """Blocks with dropout and BatchNorm, whose running statistics must not count a recomputation."""

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


def build_model(name: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """A new model, and the function that computes its loss."""
    torch.manual_seed(0)
    if name == "dropout_batchnorm":
        x = torch.randn(6, 8)
        return DropoutBatchNorm(), lambda model: model(x).square().mean()
    model, batch, loss = small_model(name, batch=4)
    return model, lambda model: loss(model(batch[0]), batch[1])


@cache
def two_plain_steps(name: str) -> dict[str, Tensor]:
    return two_steps(*build_model(name))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", all_but({*MODELS[:3], "dropout_batchnorm"}, [*MODELS, "dropout_batchnorm"]))
def test_recomputing_keeps_a_step_equal_to_the_bit(name: str, kind: Recompute) -> None:
    plain = two_plain_steps(name)
    model, run = build_model(name)
    recompute_blocks(model, kind)
    recomputed = two_steps(model, run)
    assert plain.keys() == recomputed.keys()
    for key, value in plain.items():
        assert torch.equal(value, recomputed[key]), key


@pytest.mark.core
@pytest.mark.parametrize("name", all_but({"gpt"}, ["gpt", "resnet18"]))
def test_recomputing_saves_fewer_bytes_and_costs_more_flops(name: str) -> None:
    model, batch, loss = small_model(name)
    none, selective, full = (trace_profile(model, batch, loss, recompute=k) for k in ("none", "selective", "full"))
    assert full.saved_bytes(8) < selective.saved_bytes(8) < none.saved_bytes(8)
    assert none.flops(8) == selective.flops(8) < full.flops(8)
    assert none.flops(8, "forward") == full.flops(8, "forward")


@pytest.mark.parametrize(
    ("name", "kind"),
    all_but([], [(name, kind) for name in ("gpt", "llama") for kind in KINDS]),
)
def test_equal_blocks_traced_once_cost_as_much_as_all_traced(name: str, kind: Recompute) -> None:
    model = tiny_decoder(layers=5) if name == "gpt" else tiny_llama(layers=5)
    assert [len(row.skipped) for row in find_equal_blocks(model)] == [2]
    merged, unmerged = (
        trace_profile(model, token_batch(4), scores_loss, recompute=kind, merge_equal_blocks=merge)
        for merge in (True, False)
    )
    assert merged.flops(8) == unmerged.flops(8)
    peaks = [
        predict_memory(profile, Plan(), 8, NO_OPTIMIZER, CUDA_MEMORY).allocated_bytes for profile in (merged, unmerged)
    ]
    assert peaks[0] == peaks[1]


def test_blocks_are_found_and_a_model_without_any_is_refused() -> None:
    assert find_blocks(small_model("resnet18")[0])[:3] == ("layer1.0", "layer1.1", "layer2.0")
    assert find_blocks(small_model("gpt")[0])[0] == "blocks.0"
    with pytest.raises(InputError, match=r"memory.recompute is full, but Linear has no blocks to recompute"):
        recompute_blocks(nn.Linear(2, 2), "full")


@pytest.mark.soak
def test_split_marks_are_right_where_recomputing_adds_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 adds two tensors of no size for every recomputed block."""

    def splits() -> list[tuple[str, SplitMark | None]]:
        model, tokens = tiny_decoder(layers=2), torch.zeros(2, 16, dtype=torch.long)
        profile = trace_profile(model, (tokens, tokens), scores_loss, recompute="full", with_structure=True)
        operators = [operator for segment in profile.segments for operator in segment.operators]
        return [(operator.layer, operator.split) for operator in operators if operator.kind == "matmul"]

    def checkpoint_of_torch_2_11(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        torch.empty((0,), requires_grad=True)
        torch.empty((0,))
        return checkpoint(function, *args, **kwargs)

    expected = splits()
    assert any(split for _, split in expected)
    monkeypatch.setattr(recompute, "checkpoint", checkpoint_of_torch_2_11)
    assert splits() == expected


def test_recomputed_operators_are_not_counted_as_gradients() -> None:
    model, tokens = tiny_decoder(layers=2), torch.zeros(2, 16, dtype=torch.long)

    def backward_matmuls(profile: ModelProfile, computes_gradient: bool) -> int:
        return sum(
            segment.block_count
            for segment in profile.segments
            for operator in segment.operators
            if segment.phase == "backward"
            and (operator.kind, operator.computes_gradient) == ("matmul", computes_gradient)
        )

    none, full = (trace_profile(model, (tokens, tokens), scores_loss, recompute=kind) for kind in ("none", "full"))
    assert backward_matmuls(none, False) == 0
    assert backward_matmuls(full, True) == backward_matmuls(none, True) > 0
    assert backward_matmuls(full, False) > 0


def test_blocks_are_recomputed_each_time_that_a_model_differentiates() -> None:
    """A gradient of a gradient goes through the blocks twice."""

    def penalty(model: nn.Module) -> Tensor:
        x = torch.linspace(0, 1, 16).reshape(2, 8).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        return gradient.square().sum()

    results = []
    for kind in ("none", "full"):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
        recompute_blocks(model, kind)
        results.append(two_steps(model, penalty))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
