"""Logits that stay split by vocabulary up to the loss give the loss and the gradients of full logits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshwright.parallel.tensor.shard_view import ShardView
from meshwright.workloads.text.decoder import NextTokenLoss
from tests.parallel.tensor.models import VOCABULARY, B, T
from tests.parallel.tensor.test_split_modules import gradient_errors, split
from tests.ranks import RankPool


def loss_and_gradient_errors(
    rank: int, world_size: int, name: str, modules: dict[str, Any], options: dict[str, Any]
) -> tuple[float, float]:
    """The relative error of the loss, and the largest one of a gradient."""
    model, parallel, args, _, layouts_and_group = split(name, world_size, **modules)
    target = torch.randint(0, VOCABULARY, (B, T))
    target[0, :2] = options.get("ignore_index", -100)
    losses = []
    for candidate in (model, parallel):
        logits = candidate(*args)
        assert isinstance(logits, ShardView) == (candidate is parallel)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), target.view(-1), **options)
        loss = loss if loss.dim() == 0 else (loss * torch.arange(len(loss))).sum()
        loss.backward()
        losses.append(float(loss.detach()))
    largest_gradient_error = max(gradient_errors(model, parallel, layouts_and_group).values())
    return abs(losses[0] - losses[1]) / abs(losses[0]), largest_gradient_error


@pytest.mark.soak
@pytest.mark.parametrize("name", ["nano", "llama"])
@pytest.mark.parametrize("sequence", [False, True])
def test_the_loss_of_split_logits(two: RankPool, name: str, sequence: bool) -> None:
    for loss_error, gradient_error in two.run(loss_and_gradient_errors, name, {"loss": True, "sequence": sequence}, {}):
        assert loss_error < 1e-12
        assert gradient_error < 1e-9


@pytest.mark.parametrize(
    "options", [{"ignore_index": 3}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.2}]
)
def test_options_of_cross_entropy(two: RankPool, options: dict[str, Any]) -> None:
    for loss_error, gradient_error in two.run(loss_and_gradient_errors, "nano", {"loss": True}, options):
        assert loss_error < 1e-12
        assert gradient_error < 1e-9


def other_functions_of_logits(rank: int, world_size: int) -> tuple[bool, float, float]:
    model, parallel, args, _, _ = split("nano", world_size, loss=True)
    target = torch.randint(0, VOCABULARY, (B, T))
    expected, logits = model(*args), parallel(*args)
    same_argmax = bool((logits.argmax(-1) == expected.argmax(-1)).all()) and type(logits.argmax(-1)) is torch.Tensor
    softmax_error = float((logits.log_softmax(-1) - expected.log_softmax(-1)).abs().max())
    loss_error = NextTokenLoss()(logits, target) - NextTokenLoss()(expected, target)
    return same_argmax, softmax_error, abs(float(loss_error.detach()))


def test_other_functions_see_full_logits(two: RankPool) -> None:
    for same_argmax, softmax_error, loss_error in two.run(other_functions_of_logits):
        assert same_argmax
        assert softmax_error < 1e-12
        assert loss_error < 1e-6  # it computes in fp32
