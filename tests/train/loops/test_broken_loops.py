"""Loops whose own code breaks the promise that ranks train one model: weights that one rank changes, and ranks that
leave the loop after different numbers of steps."""

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import meshwright as mw
from meshwright.errors import CollectiveError, InputError
from meshwright.train.loop_checks.copies import EVERY_STEPS
from meshwright.train.session import Session
from tests.ranks import RankFailure, RankPool

PLANS: dict[str, dict[str, Any]] = {
    "replicate": {"axes": {"replicate": 2}},
    "tensor": {"axes": {"tensor": 2}, "modules": {"splits": {"0": {"kind": "column"}, "2": {"kind": "row"}}}},
}


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def new_session(plan: str | None) -> Session:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3), nn.LayerNorm(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return mw.parallelize(
        model, optimizer, loss=F.mse_loss, plan=PLANS[plan] if plan else None, device="cpu", sample_batch=batch(0, 0)
    )


def change_weights(session: Session) -> None:
    with torch.no_grad():
        session.module.get_parameter("3.weight")[0] += 0.01


def change_rate(session: Session) -> None:
    session.optimizer.param_groups[0]["lr"] *= 0.5


def change_nothing(session: Session) -> None:
    pass


def train(rank: int, size: int, plan: str, change: Callable[[Session], None], at: int, steps: int) -> str:
    """Trains, with a change on rank 1 after step `at`. Returns the message of the error, which ends with the number of
    steps that were made."""
    session = new_session(plan)
    place = session.parallel.position.data_rank
    try:
        for step in range(steps):
            session.step(batch(step, place))
            if rank == 1 and session.steps == at:
                change(session)
        session.state_dict()
    except InputError as error:
        return f"{error} [{session.steps}]"
    return ""


@pytest.mark.parametrize("plan", PLANS)
def test_weights_that_one_rank_changes_are_named(two: RankPool, plan: str) -> None:
    for message in two.run(train, plan, change_weights, 5, 20):
        assert message.startswith("3.weight"), "the one that differs most"
        assert "of rank 1 differ from those of rank 0, at step 8: the loop or a callback" in message
        assert message.endswith("[7]"), "in the eighth step"


def test_a_learning_rate_that_one_rank_changes_is_noticed_by_its_weights(two: RankPool) -> None:
    for message in two.run(train, "replicate", change_rate, 2, 20):
        assert "and 5 other weights of rank 1 differ from those of rank 0, at step 4" in message


def test_weights_are_compared_before_they_are_saved(two: RankPool) -> None:
    for message in two.run(train, "replicate", change_weights, 11, 11):
        assert "3.weight of rank 1 differ" in message
        assert message.endswith("[11]")


@pytest.mark.parametrize("plan", PLANS)
def test_equal_weights_stay_equal(two: RankPool, plan: str) -> None:
    assert two.run(train, plan, change_nothing, 0, EVERY_STEPS + 2) == ["", ""]


def own_loop(rank: int, size: int) -> str:
    session = new_session("replicate")
    try:
        for step in range(20):
            session.optimizer.zero_grad()
            session.backward(session.forward(batch(step, rank)))
            session.optimizer.step()
            if rank == 1 and session.steps == 3:
                change_weights(session)
    except InputError as error:
        return str(error)
    return ""


def test_loops_that_call_backward(two: RankPool) -> None:
    for message in two.run(own_loop):
        assert message.startswith("3.weight")
        assert "of rank 1 differ from those of rank 0, at step 4" in message


# ---- ranks that make different numbers of steps


class Endless(IterableDataset[Any]):
    """A stream that ends after 20 samples on rank 1."""

    def __init__(self, rank: int) -> None:
        self.samples = 20 if rank == 1 else 40

    def __iter__(self) -> Iterator[Any]:
        rows = batch(0, 0)
        return ((rows[0][0], rows[1][0]) for _ in range(self.samples))


def leave_early(rank: int, size: int, plan: str, cause: str, folder: Path) -> None:
    """Rank 1 makes 5 steps, and rank 0 waits for it in the sixth. Writes the message of rank 0."""
    session = new_session(plan)
    place = session.parallel.position.data_rank
    if cause == "stream":
        batches: Any = session.batches(Endless(rank), 1, 4)
    elif cause == "prepared stream":
        batches = session.prepare(DataLoader(Endless(rank), batch_size=4))
    else:
        batches = (batch(step, place) for step in range(10))
    try:
        for item in batches:
            if cause == "break" and rank == 1 and session.steps == 5:
                break
            session.step(item)
    except CollectiveError as error:
        (folder / str(rank)).write_text(str(error))
    del session, batches
    gc.collect()  # as at the end of a program


def message_of_rank_0(folder: Path, plan: str, cause: str) -> str:
    pool = RankPool(2, timeout_s=30)  # whose ranks are of no use afterwards
    try:
        with suppress(RankFailure):
            pool.run(leave_early, plan, cause, folder)
    finally:
        pool.close()
    return (folder / "0").read_text()


@pytest.mark.parametrize(
    ("plan", "cause"),
    [("replicate", "stream"), ("replicate", "prepared stream"), ("replicate", "break")],
)
def test_a_rank_that_leaves_early_is_named_with_its_steps(tmp_path: Path, plan: str, cause: str) -> None:
    message = message_of_rank_0(tmp_path, plan, cause)
    line = r"rank 1 has left its loop after 5 steps, and rank 0 waits for it in step 6 \(\w+\): all ranks must make"
    assert re.match(line, message), message
