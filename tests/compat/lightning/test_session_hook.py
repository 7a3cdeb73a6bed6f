"""A LightningModule that trains its model through a session, under plans that split it or cut it into stages."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs the package lightning: pip install lightning==2.6.6")

from torch import Tensor
from torch.utils.data import DataLoader

from meshwright.errors import InputError
from tests.compat.lightning.modules import GLOBAL_BATCH, Regression, WithSession, largest_difference, plain, samples
from tests.compat.lightning.trainers import make_trainer
from tests.ranks import RankPool, ranks
from tests.soaked import all_but

PIPELINE = {"axes": {"pipeline": 2}, "pipeline": {"cuts": ["2"], "microbatches": 2, "schedule": "gpipe"}}


def train(
    rank: int, size: int, plan: Any, folder: str, epochs: int, loads: str | None, saves: str | None
) -> tuple[int, dict[str, Tensor]]:
    from meshwright.compat.lightning import MeshwrightStrategy

    strategy = MeshwrightStrategy(plan=plan, checkpoint_format="meshwright")
    trainer = make_trainer(rank, size, strategy, folder, max_epochs=epochs, use_distributed_sampler=False)
    trainer.fit(WithSession(), DataLoader(samples(), batch_size=GLOBAL_BATCH), ckpt_path=loads)
    if saves:
        trainer.save_checkpoint(saves)
    return trainer.global_step, plain(strategy.full_state_dict())


@pytest.mark.parametrize("plan", all_but([{"axes": {"tensor": 2}}], [{"axes": {"tensor": 2}}, PIPELINE]))
def test_split_and_cut_models_train_as_one_process(plan: Any, two: RankPool, tmp_path: Path) -> None:
    with ranks(1) as one:
        steps, expected = one.run(train, None, str(tmp_path), 3, None, None)[0]
    assert steps == 18
    path = str(tmp_path / "last.ckpt")
    two.run(train, plan, str(tmp_path), 2, None, path)
    steps, weights = two.run(train, plan, str(tmp_path), 3, path, None)[0]
    assert steps == 18
    assert largest_difference(expected, weights) < 1e-9


def refused(rank: int, size: int, folder: str) -> str:
    from meshwright.compat.lightning import MeshwrightStrategy

    trainer = make_trainer(rank, size, MeshwrightStrategy(plan={"axes": {"tensor": 2}}), folder)
    with pytest.raises(InputError) as error:
        trainer.fit(Regression(), DataLoader(samples(), batch_size=GLOBAL_BATCH))
    return str(error.value)


def test_a_whole_module_is_not_split(two: RankPool, tmp_path: Path) -> None:
    message = two.run(refused, str(tmp_path))[0]
    assert "axes.tensor is 2" in message
    assert "session(self, plan)" in message
