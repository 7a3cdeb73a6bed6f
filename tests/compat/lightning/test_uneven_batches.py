"""Validation and prediction of a sharded module where ranks have different numbers of batches. Lightning divides
samples in this way for prediction, and a rank that is done does not wait for the others."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs the package lightning: pip install lightning==2.6.6")

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from tests.compat.lightning.modules import Regression, largest_difference, plain, samples
from tests.compat.lightning.trainers import make_trainer
from tests.ranks import RankPool


class Predicting(Regression):
    def predict_step(self, batch: Any, index: int) -> Tensor:
        output: Tensor = self(batch[0])
        return output


def loader(first: int, count: int) -> "DataLoader[Any]":
    return DataLoader(Subset(samples(), range(first, first + count)), batch_size=4)


def train_and_predict(rank: int, size: int, axis: str, folder: str) -> dict[str, Any]:
    """Trains, predicts and trains again, with loaders of 3 batches on rank 0 and one on rank 1 for validation and
    prediction."""
    from meshwright.compat.lightning import MeshwrightStrategy

    strategy = MeshwrightStrategy(plan={"axes": {axis: size}})
    trainer = make_trainer(rank, size, strategy, folder, max_epochs=1, use_distributed_sampler=False)
    module, training, evaluation = Predicting(), loader(12 * rank, 12), loader(24 * rank, 4 if rank else 9)
    trainer.fit(module, training, evaluation)
    predictions: Any = trainer.predict(module, evaluation)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, training, evaluation)
    return {"weights": plain(strategy.full_state_dict()), "predictions": predictions}


def test_shards_are_gathered_where_ranks_have_different_numbers_of_batches(two: RankPool, tmp_path: Path) -> None:
    replicas, shards = (two.run(train_and_predict, axis, str(tmp_path)) for axis in ("replicate", "shard"))
    assert [len(result["predictions"]) for result in shards] == [3, 1]
    assert largest_difference(replicas[0]["weights"], shards[0]["weights"]) < 1e-9
    for expected, result in zip(replicas, shards, strict=True):
        assert torch.allclose(torch.cat(expected["predictions"]), torch.cat(result["predictions"]), rtol=0, atol=1e-9)
