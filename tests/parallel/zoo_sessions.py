"""Sessions that train a model of the zoo in the precision of the proofs, and save and load checkpoints."""

from pathlib import Path

import torch
from torch import Tensor

from meshwright.plan import Plan
from meshwright.processes.heartbeat import Heartbeat
from meshwright.proof.record.record import make_session
from meshwright.proof.reference.reference_setup import ReferenceSetup, build_setup, default_dtype
from meshwright.train.session import Session
from tests.proof.matrix_case import data_in_dtype, matrix_request
from tests.ranks import RankPool
from tests.train.one_process import world
from tests.zoo import BATCH


def zoo_session(kind: str, plan: Plan, rank: int, size: int) -> tuple[Session, ReferenceSetup]:
    """Returns the session of one rank, and the setup whose data it trains on."""
    request = matrix_request(kind, plan)
    setup = build_setup(request)
    return make_session(setup, request, world(rank, size), Heartbeat.in_memory()), setup


def run_step(session: Session, setup: ReferenceSetup) -> dict[str, Tensor]:
    """Trains one step, and returns the whole weights after it."""
    with default_dtype(setup.dtype):
        session.step(next(session.batches(data_in_dtype(setup), 1, BATCH)))
        return session.state_dict()


def save_after_first_step(rank: int, size: int, kind: str, plan: Plan, path: Path) -> dict[str, Tensor]:
    """Saves a checkpoint after the first step, and returns the weights after the second one."""
    session, setup = zoo_session(kind, plan, rank, size)
    run_step(session, setup)
    session.save(path)
    return run_step(session, setup)


def load_and_run_step(rank: int, size: int, kind: str, plan: Plan, path: Path) -> dict[str, Tensor]:
    """Loads a checkpoint, and returns the weights after one more step."""
    session, setup = zoo_session(kind, plan, rank, size)
    session.load(path)
    return run_step(session, setup)


def check_checkpoints_move(pool: RankPool, kind: str, plan: Plan, second_plan: Plan, folder: Path) -> None:
    """Asserts that training goes on in the same way after a checkpoint was saved under the plan and loaded in one
    process, saved in one process and loaded under the plan, or saved under the plan and loaded under the second one."""
    states: list[dict[str, Tensor]] = pool.run(save_after_first_step, kind, plan, folder / "plan")
    expected = save_after_first_step(0, 1, kind, Plan(), folder / "one_process")
    states.append(load_and_run_step(0, 1, kind, Plan(), folder / "plan"))
    states += pool.run(load_and_run_step, kind, plan, folder / "one_process")
    states += pool.run(load_and_run_step, kind, second_plan, folder / "plan")
    for state in states:
        assert list(state) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12, msg=name)
