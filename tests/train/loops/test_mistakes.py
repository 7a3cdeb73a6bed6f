"""Mistakes in a user's loop that would train other weights on each rank, or in the wrong direction, are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw
from meshwright.errors import InputError
from meshwright.train.session import Session
from tests.ranks import RankPool
from tests.train.loops.models import AXES, model, pairs, plan_of, shuffled


def new_session(axis: str = "replicate", size: int = 1) -> Session:
    module = model(5, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return mw.parallelize(module, optimizer, loss=F.mse_loss, plan=plan_of(axis, size), device="cpu")


def own_backward(session: Session, size: int) -> None:
    session.forward(next(iter(session.prepare(shuffled(pairs()))))).backward()


def backward_of_another_session(session: Session, size: int) -> None:
    loss = session.forward(next(iter(session.prepare(shuffled(pairs())))))
    new_session("replicate", size).backward(loss)


def only_no_sync(session: Session, size: int) -> None:
    with session.no_sync():
        session.backward(session.forward(next(iter(session.prepare(shuffled(pairs()))))))


def refused_step(rank: int, size: int, axis: str, mistake: Callable[[Session, int], None]) -> str:
    session = new_session(axis, size)
    mistake(session, size)
    with pytest.raises(InputError) as refusal:
        session.optimizer.step()
    return str(refusal.value)


@pytest.mark.parametrize("mistake", [own_backward, backward_of_another_session])
def test_a_step_needs_the_backward_of_its_session(two: RankPool, mistake: Callable[..., None]) -> None:
    for message in two.run(refused_step, "replicate", mistake):
        assert "replace loss.backward() by session.backward(loss)" in message


@pytest.mark.parametrize("axis", AXES)
def test_a_step_needs_a_backward_outside_of_no_sync(two: RankPool, axis: str) -> None:
    for message in two.run(refused_step, axis, only_no_sync):
        assert "call it outside of no_sync for the last batch of a step" in message


def step_after_an_unused_pass(rank: int, size: int) -> int:
    session = new_session("replicate", size)
    for batch in session.prepare(shuffled(pairs())):
        session.forward(batch)  # a loop that prints this loss, and trains with `step`
        session.step(batch)
    return session.steps


def test_a_step_may_follow_a_forward_pass_without_backward(two: RankPool) -> None:
    assert all(steps > 0 for steps in two.run(step_after_an_unused_pass))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda session: session.backward(3.0), "this is a float"),
        (lambda session: session.backward(torch.zeros(())), r"a tensor of shape \(\) without a gradient"),
        (lambda session: session.mean(torch.zeros(2), 2), r"a tensor of shape \(2,\)"),
        (lambda session: session.mean(torch.zeros(()), -1), "count is -1"),
        (lambda session: session.mean(torch.zeros(()), "2"), "count is '2'"),
        (lambda session: session.clip_gradients(-1.0), "max_norm is -1.0"),
        (lambda session: session.clip_gradients(float("nan")), "max_norm is nan"),
    ],
)
def test_wrong_arguments_of_a_loop_are_refused(call: Callable[[Session], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(new_session())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", F.relu),
        ("loss", "mse"),
        ("clip_norm", -1.0),
        ("clip_norm", float("nan")),
        ("on_nonfinite", "stop"),
        ("seed", "x"),
        ("device", "tpu"),
        ("timeout_s", 0),
    ],
)
def test_wrong_arguments_of_parallelize_are_refused(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"model": nn.Linear(2, 2), name: value}
    with pytest.raises(InputError, match=rf"^{name} is "):
        mw.parallelize(**arguments)
