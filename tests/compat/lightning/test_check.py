"""The strategy of Lightning refuses a plan that trains another model before its first step."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs the package lightning: pip install lightning==2.6.6")

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from meshwright.errors import UnequalPlan
from tests.compat.lightning.modules import GLOBAL_BATCH, WithSession, samples
from tests.compat.lightning.trainers import make_trainer
from tests.proof.before_training.models import FollowsBatch, scale_gradients_of_divided_models
from tests.ranks import RankPool


class OfModel(LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = FollowsBatch(kind)

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(rank: int, size: int, folder: str) -> list[tuple[str, int]]:
    """Trains modules whose forward pass changes a buffer by its samples, or does not; and one under tensor 2, whose
    gradients are wrong, through its session."""
    from meshwright.compat.lightning import MeshwrightStrategy

    classes = DataLoader(TensorDataset(torch.randn(16, 8), torch.randint(3, (16,))), batch_size=4)
    cases: list[Any] = [
        (OfModel("buffer"), MeshwrightStrategy(), classes),
        (OfModel("neither"), MeshwrightStrategy(), classes),
        (OfModel("buffer"), MeshwrightStrategy(check=False), classes),
        (
            WithSession(),
            MeshwrightStrategy(plan={"axes": {"tensor": 2}}, checkpoint_format="meshwright"),
            DataLoader(samples(), batch_size=GLOBAL_BATCH),
        ),
    ]
    outcomes = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", f"{folder}/cache")
        scale_gradients_of_divided_models(patch)
        for module, strategy, loader in cases:
            trainer = make_trainer(rank, size, strategy, folder, max_epochs=1)
            try:
                trainer.fit(module, loader)
                outcomes.append(("trained", trainer.global_step))
            except UnequalPlan as error:
                outcomes.append((str(error), trainer.global_step))
    return outcomes


def test_an_unequal_plan_is_refused_before_the_first_step(two: RankPool, tmp_path: Path) -> None:
    for (state, no_steps), equal, unchecked, (tensor, none_either) in two.run(fit, str(tmp_path)):
        assert "the forward pass changes module.model.center by the samples" in state
        assert "the plan (tensor 2 · fp32) does not train the same model" in tensor
        assert "scaled" in tensor
        assert (no_steps, none_either) == (0, 0)
        assert equal == unchecked == ("trained", 2)
