"""Fixed shares together with each way of combining gradients and of loading data: the model that one process trains,
or with PowerSGD the one that even shares train. Shares with axes and numerics are in tests/proof/test_shares.py, with
parameter servers in tests/train/servers/test_servers.py."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from meshwright.data.batch import LoadingOptions
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.train.session import Session
from tests.ranks import RankPool
from tests.train.loops.models import assert_close, pairs, plan_of, shuffled
from tests.train.loops.models import model as own_model
from tests.train.loops.test_own_backward import accumulation, plain_accumulation, session_for
from tests.train.one_process import world
from tests.train.runs.test_combining import EXACT, Points, model

SHARES = [5, 2, 1]
EVEN: list[int] = []


class Stream(IterableDataset[Any]):
    """The points as a stream, which every rank reads."""

    def __iter__(self) -> Iterator[Any]:
        points = Points()
        return (points[index] for index in range(len(points)))


DATA: dict[str, tuple[type[Dataset[Any]], LoadingOptions]] = {
    "samples": (Points, LoadingOptions()),
    "workers": (Points, LoadingOptions(workers=2)),
    "parts": (Points, LoadingOptions(partition="sample", parts=8)),
    "stream": (Stream, LoadingOptions()),
    "stream with workers": (Stream, LoadingOptions(workers=2)),
}


def train(
    rank: int, size: int, shares: list[int], gradients: dict[str, Any], data: str = "samples", **groups: Any
) -> tuple[list[float], dict[str, Tensor], dict[str, float] | None]:
    """Trains two epochs of 96 samples in batches of 22, and evaluates. Returns losses, weights and metrics."""
    plan = Plan.model_validate(
        {"axes": {"replicate": size}, "gradients": {"bucket_bytes": 9000, **gradients}, "shares": shares, **groups}
    )
    session = Session(
        model(),
        lambda parameters: torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9),
        loss=nn.CrossEntropyLoss(),
        plan=plan,
        world=world(rank, size),
        clip_norm=0.5,
    )
    dataset, loading = DATA[data]
    losses = [float(session.step(batch)) for batch in session.batches(dataset(), 2, 22, loading)]
    metrics = session.evaluate(dataset(), batch=22, loading=loading)
    assert metrics is not None
    return losses, session.state_dict(), metrics


def train_with_each(rank: int, size: int, shares: list[int], choices: list[dict[str, Any]]) -> list[Any]:
    return [train(rank, size, shares, gradients) for gradients in choices]


def test_every_algorithm_combines_the_gradients_of_unequal_shares(three: RankPool) -> None:
    choices = [{"algorithm": algorithm} for algorithm in EXACT]
    expected = train(0, 1, EVEN, {})
    for results in three.run(train_with_each, SHARES, choices):
        for losses, weights, metrics in results:
            assert_close(losses, expected[0])
            assert_close(weights, expected[1])
            assert metrics == pytest.approx(expected[2], rel=1e-9)


def test_powersgd_and_rounded_gradients_of_unequal_shares_are_those_of_even_ones(three: RankPool) -> None:
    """The low-rank approximation, and what it leaves for the next step, depend on the mean of the gradients only. Each
    rank rounds its own part, so that rounding differs."""
    choices: list[dict[str, Any]] = [{"powersgd_rank": 2}, {"precision": "bf16"}]
    even, unequal = (three.run(train_with_each, shares, choices)[1] for shares in (EVEN, SHARES))
    exact = train(0, 1, EVEN, {})
    for position, tolerance in ((0, 1e-9), (1, 2e-2)):
        assert even[position][0] != pytest.approx(exact[0], rel=1e-9)  # they are not exact
        assert unequal[position][0] == pytest.approx(even[position][0], rel=tolerance)
    assert_close(unequal[0][1], even[0][1])


@pytest.mark.soak
@pytest.mark.parametrize("data", list(DATA))
def test_loaders_and_streams_divide_batches_by_shares(data: str, three: RankPool) -> None:
    expected = train(0, 1, EVEN, {}, data)
    for losses, weights, metrics in three.run(train, SHARES, {}, data):
        assert_close(losses, expected[0])
        assert_close(weights, expected[1])
        assert metrics == pytest.approx(expected[2], rel=1e-9)


@pytest.mark.parametrize("explicit", [True, pytest.param(False, marks=pytest.mark.soak)])
@pytest.mark.parametrize("axis", ["replicate", pytest.param("shard", marks=pytest.mark.soak)])
def test_a_loop_with_its_own_backward_takes_shares(axis: str, explicit: bool, three: RankPool) -> None:
    losses, weights = plain_accumulation()
    for found_losses, found_weights in three.run(accumulation, plan_of(axis, 3, shares=SHARES), explicit):
        assert_close(found_losses, losses)
        assert_close(found_weights, weights)


def unweighted(rank: int, size: int) -> str:
    session = session_for(own_model(5, 4), plan_of("replicate", size, shares=SHARES))
    for inputs, target in session.prepare(shuffled(pairs(22))):
        loss = nn.functional.mse_loss(session(inputs), target)
        with pytest.raises(InputError) as error:
            session.backward(loss)
        session.backward(session.mean(loss, 1))  # a loss with equal weights, on purpose
        return str(error.value)
    return ""


def test_a_loss_without_the_weights_of_shares_is_refused(three: RankPool) -> None:
    for answer in three.run(unweighted):
        assert answer.startswith("the plan has shares (5, 2, 1), so the ranks' losses have different weights: ")
        assert "session.mean(loss)" in answer
