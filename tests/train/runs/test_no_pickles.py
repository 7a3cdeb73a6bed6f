"""No message between ranks is a pickle, under any kind of plan: neither ours nor one that torch sends for us."""

from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from meshwright.proof.reference.reference_setup import default_dtype
from meshwright.train.output.recording import record_steps
from tests.parallel.zoo_sessions import zoo_session
from tests.proof.matrix import plan_of
from tests.proof.matrix_case import data_in_dtype
from tests.ranks import RankPool
from tests.soaked import all_but
from tests.zoo import BATCH

# Kinds of models and plans. The first case is small; only the soak runs the others.
QUICK = ("multitask", "P2T2")
CASES = ["R4", "P2T2", "S4", "R2S2", "T4 sequence", "R2P2 zbv", "R2P2 interleaved_1f1b", "S2P2"]


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("a pickle was sent or received")


def train_without_pickles(rank: int, size: int, kind: str, case: str, folder: Path) -> tuple[int, bool]:
    """Trains, records, evaluates, saves and loads. Returns the number of steps, and whether a pickle would fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_c10d, "_object_to_tensor", refuse)
        patch.setattr(distributed_c10d, "_tensor_to_object", refuse)
        session, setup = zoo_session(kind, plan_of(kind, case), rank, size)
        data = data_in_dtype(setup)
        with default_dtype(setup.dtype):
            with record_steps(session, folder / "record", 1) as step:
                step(next(session.batches(data, 1, BATCH)))
            assert session.evaluate([data[0]], batch=4) is not None  # fewer samples than ranks
            session.save(folder / "saved")
            session.load(folder / "saved")
            session.step(next(session.batches(data, 1, BATCH)))
        try:
            dist.all_gather_object([None] * size, rank)
        except AssertionError:
            return session.steps, True
    return session.steps, False


@pytest.mark.parametrize(("kind", "case"), all_but({QUICK}, [QUICK, *(("gpt", case) for case in CASES)]))
def test_ranks_train_save_and_load_without_pickles(four: RankPool, tmp_path: Path, kind: str, case: str) -> None:
    assert four.run(train_without_pickles, kind, case, tmp_path) == [(2, True)] * 4
    assert (tmp_path / "record" / "step-0001.pt").exists()
