"""Scores that stay divided by vocabulary up to the loss give the loss and the gradients of whole ones."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshwright.parallel.tensor.shard_view import ShardView
from meshwright.workloads.text.decoder import NextTokenLoss
from tests.parallel.tensor.models import VOCABULARY, B, T
from tests.parallel.tensor.test_split_modules import gradient_errors, split
from tests.ranks import RankPool


def losses(
    rank: int, world_size: int, name: str, modules: dict[str, Any], options: dict[str, Any]
) -> tuple[float, float]:
    """Errors of the loss and of the gradients."""
    model, parallel, args, _, laid = split(name, world_size, **modules)
    target = torch.randint(0, VOCABULARY, (B, T))
    target[0, :2] = options.get("ignore_index", -100)
    found = []
    for each in (model, parallel):
        scores = each(*args)
        assert isinstance(scores, ShardView) == (each is parallel)
        loss = F.cross_entropy(scores.view(-1, scores.size(-1)), target.view(-1), **options)
        loss = loss if loss.dim() == 0 else (loss * torch.arange(len(loss))).sum()
        loss.backward()
        found.append(float(loss.detach()))
    return abs(found[0] - found[1]) / abs(found[0]), max(gradient_errors(model, parallel, laid).values())


@pytest.mark.soak
@pytest.mark.parametrize("name", ["nano", "llama"])
@pytest.mark.parametrize("sequence", [False, True])
def test_the_loss_of_divided_scores(two: RankPool, name: str, sequence: bool) -> None:
    for value, gradients in two.run(losses, name, {"loss": True, "sequence": sequence}, {}):
        assert value < 1e-12
        assert gradients < 1e-9


@pytest.mark.parametrize(
    "options", [{"ignore_index": 3}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.2}]
)
def test_the_losss_options(two: RankPool, options: dict[str, Any]) -> None:
    for value, gradients in two.run(losses, "nano", {"loss": True}, options):
        assert value < 1e-12
        assert gradients < 1e-9


def others(rank: int, world_size: int) -> tuple[bool, float, float]:
    model, parallel, args, _, _ = split("nano", world_size, loss=True)
    target = torch.randint(0, VOCABULARY, (B, T))
    right, found = model(*args), parallel(*args)
    same = bool((found.argmax(-1) == right.argmax(-1)).all()) and type(found.argmax(-1)) is torch.Tensor
    far = float((found.log_softmax(-1) - right.log_softmax(-1)).abs().max())
    wide = NextTokenLoss()(found, target) - NextTokenLoss()(right, target)
    return same, far, abs(float(wide.detach()))


def test_what_else_is_asked_of_scores_sees_them_whole(two: RankPool) -> None:
    for same, far, wide in two.run(others):
        assert same
        assert far < 1e-12
        assert wide < 1e-6  # it computes in fp32
