"""Schedules that need a metric, in a user's loop."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau

import meshwright as mw
from meshwright.errors import InputError
from tests.ranks import RankPool
from tests.train.loops.models import model, pairs, shuffled


def session_with_plateau(**options: Any) -> mw.Session:
    module = model(5, 4)
    return mw.parallelize(
        module,
        torch.optim.SGD(module.parameters(), lr=1.0),
        loss=F.mse_loss,
        schedule=lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
        device="cpu",
        **options,
    )


def rates(rank: int, size: int) -> list[float]:
    """Each rank has another metric, of which that of rank 0 counts: it becomes worse in the last epoch only."""
    session = session_with_plateau()
    found = []
    for metric in (3.0, 2.0, 4.0):
        for batch in session.prepare(shuffled(pairs())):
            session.step(batch)
        session.step_schedule(metric if rank == 0 else -metric)
        found.append(session.optimizer.param_groups[0]["lr"])
    return found


def test_a_plateau_lowers_the_rate_alike_on_all_ranks(two: RankPool) -> None:
    assert rates(0, 1) == [1.0, 1.0, 0.5]
    assert two.run(rates) == [[1.0, 1.0, 0.5]] * 2


def test_a_schedule_without_its_metric_is_refused() -> None:
    with pytest.raises(InputError, match=r"ReduceLROnPlateau needs a metric: call session\.step_schedule\(metric\)"):
        session_with_plateau().step_schedule()


def test_a_plateau_is_saved_and_loaded(tmp_path: Path) -> None:
    session = session_with_plateau()
    for metric in (1.0, 2.0, 3.0):
        session.step_schedule(metric)
    session.save(tmp_path / "last")
    again = session_with_plateau()
    again.load(tmp_path / "last")
    assert again.optimizer.param_groups[0]["lr"] == 0.25
    again.step_schedule(4.0)
    assert again.optimizer.param_groups[0]["lr"] == 0.125
