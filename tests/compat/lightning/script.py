"""A user's script with Lightning's Trainer, which tests start as processes. Its argument is a JSON object: `module`,
`plan` ("ddp" for Lightning's own strategy), `folder`, `devices`, `num_nodes`, and optionally `environment` ("kubeflow",
which Lightning does not recognize by itself), `loads` and `dies`. Rank 0 writes the weights to weights.pt."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments import KubeflowEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from meshwright.compat.lightning import MeshwrightStrategy
from tests.compat.lightning.modules import DieOnce, Samples, plain
from tests.compat.lightning.trainers import MODULES


class SamplesOfTrainer(Samples):
    """The batches of the rank that the trainer says."""

    def train_dataloader(self) -> "DataLoader[Any]":
        assert self.trainer is not None
        self.ranks, self.rank = self.trainer.world_size, self.trainer.global_rank
        return super().train_dataloader()


def main(settings: dict[str, Any]) -> None:
    folder = Path(settings["folder"])
    plan = settings["plan"]
    strategy: Any = "ddp_find_unused_parameters_true" if plan == "ddp" else MeshwrightStrategy(plan=plan)
    callbacks: list[Any] = [ModelCheckpoint(dirpath=folder, save_last=True)]
    if settings.get("dies"):
        callbacks.append(DieOnce(str(folder / "killed")))
    trainer = Trainer(
        accelerator="cpu",
        devices=settings["devices"],
        num_nodes=settings["num_nodes"],
        strategy=strategy,
        plugins=[KubeflowEnvironment()] if settings.get("environment") == "kubeflow" else None,
        gradient_clip_val=0.3 if settings["module"] == "regression" else None,
        max_epochs=5,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(MODULES[settings["module"]](), datamodule=SamplesOfTrainer(), ckpt_path=settings.get("loads"))
    in_use: Any = trainer.strategy
    weights = plain(in_use.lightning_module_state_dict() if plan == "ddp" else in_use.full_state_dict())
    if trainer.is_global_zero:
        torch.save(weights, folder / "weights.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(json.loads(sys.argv[1]))
