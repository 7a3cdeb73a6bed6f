"""Runs Lightning's Trainer on one rank of a pool."""

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.compat.lightning.modules import EPOCHS, CountSteps, DieOnce, Gan, Regression, Samples, plain

MODULES = {"regression": Regression, "gan": Gan, "gan without toggling": lambda: Gan(toggles=False)}


class PoolEnvironment(ClusterEnvironment):
    """The ranks of a test's pool, which have made their process group already."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    creates_processes_externally = True
    main_address, main_port = "127.0.0.1", 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._size

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return self._rank

    def node_rank(self) -> int:
        return 0


def make_trainer(rank: int, size: int, strategy: Any, folder: str | Path, **options: Any) -> Trainer:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(
        accelerator="cpu",
        devices=size,
        strategy=strategy,
        plugins=[PoolEnvironment(rank, size)],
        default_root_dir=folder,
        enable_model_summary=False,
        **{"max_epochs": EPOCHS, **quiet, **options},
    )


def fit(
    rank: int,
    size: int,
    name: str,
    plan: Any,
    folder: str,
    options: dict[str, Any] | None = None,
    loads: str | None = None,
    saves: str | None = None,
    strategy_options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Trains a module. `plan` is "ddp" for Lightning's own strategy. Returns the weights, and what the callback
    read."""
    from meshwright.compat.lightning import MeshwrightStrategy

    ours = MeshwrightStrategy(plan=None if plan == "ddp" else plan, **(strategy_options or {}))
    strategy = "ddp_find_unused_parameters_true" if plan == "ddp" else ours
    counter = CountSteps()
    clip = {"gradient_clip_val": 0.3} if name == "regression" else {}
    others: dict[str, Any] = {**clip, **(options or {})}
    callbacks = [counter, *others.pop("callbacks", [])]
    trainer = make_trainer(rank, size, strategy, folder, callbacks=callbacks, **others)
    module: LightningModule = MODULES[name]()
    trainer.fit(module, datamodule=Samples(size, rank), ckpt_path=loads)
    if saves:
        trainer.save_checkpoint(saves)
    strategy_in_use: Any = trainer.strategy
    whole = strategy_in_use.lightning_module_state_dict if plan == "ddp" else strategy_in_use.full_state_dict
    weights = plain(whole())
    return {"weights": weights, "losses": counter.losses, "validations": counter.validations}


def fit_and_die(
    rank: int, size: int, name: str, plan: Any, folder: str, loads: str | None, strategy_options: dict[str, Any]
) -> dict[str, Any]:
    """Trains a module with a checkpoint after each epoch. The last rank is killed once, in the second epoch. With
    "last" as `loads`, the training continues from the last checkpoint."""
    callbacks = [DieOnce(f"{folder}/killed"), ModelCheckpoint(dirpath=folder, save_last=True)]
    options = {"enable_checkpointing": True, "callbacks": callbacks}
    return fit(rank, size, name, plan, folder, options, loads, None, strategy_options)


def same_on_ranks(results: list[dict[str, Any]]) -> bool:
    return all(
        torch.equal(one["weights"][name], results[0]["weights"][name]) for one in results for name in one["weights"]
    )
