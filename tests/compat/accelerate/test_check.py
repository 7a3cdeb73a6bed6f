"""`Accelerator` refuses a plan that trains another model when the model is prepared."""

from typing import Any

import pytest

pytest.importorskip("accelerate", reason="the package accelerate is not installed")

import torch
from torch.utils.data import DataLoader, TensorDataset

from meshwright.compat.accelerate import Accelerator
from meshwright.errors import UnequalPlan
from tests.compat.accelerate.loops import accelerate_process
from tests.proof.before_training.models import FollowsBatch
from tests.ranks import RankPool


def prepare(rank: int, size: int) -> list[str]:
    """Prepares a model whose forward pass changes a buffer by its samples, one that does not, and the first one without
    a check."""
    outcomes = []
    for kind, check in (("buffer", True), ("neither", True), ("buffer", False)):
        torch.manual_seed(0)
        model = FollowsBatch(kind)
        loader: Any = DataLoader(TensorDataset(torch.randn(16, 8), torch.randint(3, (16,))), batch_size=4)
        with accelerate_process(rank, size):
            accelerator = Accelerator(check=check)
            try:
                accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
                outcomes.append("prepared")
            except UnequalPlan as error:
                outcomes.append(str(error))
    return outcomes


def test_state_that_follows_the_batch_is_refused(two: RankPool) -> None:
    for refused, *others in two.run(prepare):
        assert "replicate 2" in refused
        assert "the forward pass changes center by the samples that it sees" in refused
        assert "check=False" in refused
        assert others == ["prepared", "prepared"]
