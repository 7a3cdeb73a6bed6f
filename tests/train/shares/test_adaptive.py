"""Adaptive shares in running ranks: samples move to the faster rank, the training stays that of one process, and a
session that is resumed repeats the same shares."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshwright as mw
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.plan_rules.table import check_rules
from meshwright.train.session import Session
from meshwright.train.shares.adaptive import ShareDecision
from tests.ranks import RankPool

STEPS, BATCH = 45, 12


class RecordedClock:
    """A clock of a rank that computes a recorded number of samples per second."""

    def __init__(self, speed: float) -> None:
        self.speed = speed

    def loaded(self, seconds: float) -> None: ...
    def begin(self) -> None: ...
    def mark(self, activity: str) -> None: ...
    def end(self, samples: int, first_samples: int, counts: bool) -> None: ...
    def take_speed(self) -> float:
        return self.speed


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(100, 5, generator=generator, dtype=torch.float64),
        torch.randint(0, 3, (100,), generator=generator),
    )


def session_with(plan: dict[str, Any]) -> Session:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    template = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return mw.parallelize(model, template, loss=F.cross_entropy, plan=plan, device="cpu")


def train(
    session: Session, speed: float, steps: int, prepared: bool = False
) -> tuple[list[float], list[tuple[int, ...]], list[ShareDecision]]:
    """Returns the losses, the shares by step, and the decisions."""
    decisions: list[ShareDecision] = []
    losses, shares = [], []
    assert session.shares is not None
    session.shares.on_decision = decisions.append
    session.shares.clock = RecordedClock(speed)
    while session.steps < steps:
        loader = DataLoader(data(), BATCH)
        batches = session.prepare(loader) if prepared else session.batches(data(), None, BATCH)
        for batch in batches:
            shares.append(session.shares.table.at(session.steps))
            losses.append(float(session.step(batch)))
            if session.steps >= steps:
                break
    return losses, shares, decisions


def state_of(session: Session) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in session.state_dict().items()}


def resumed(rank: int, size: int, axes: dict[str, int], folder: Path) -> dict[str, Any]:
    """Trains, and again from a checkpoint that was saved while a change had been decided but had not begun."""
    plan = {"axes": axes, "shares": "adaptive"}
    speed = (1.0, 0.5)[rank]
    first = session_with(plan)
    losses, shares, decisions = train(first, speed, 6)
    first.save(folder / "checkpoint")
    more = train(first, speed, STEPS)
    second = session_with(plan)
    second.load(folder / "checkpoint")
    assert second.shares is not None
    # The speeds are others now, but what was decided before is repeated.
    second.shares.repeat(decision for decision in more[2] if decision.step > 6)
    again = train(second, 1.0, STEPS)
    equal = all(torch.equal(value, state_of(second)[name]) for name, value in state_of(first).items())
    return {
        "losses": losses + more[0],
        "shares": shares + more[1],
        "decisions": decisions + more[2],
        "again": again[:2],
        "equal": equal,
        "more": train(second, 1.0, STEPS + 30)[1],
    }


def one_process() -> list[float]:
    session = session_with({})
    losses = []
    for batch in session.batches(data(), None, BATCH):
        losses.append(float(session.step(batch)))
        if session.steps == STEPS:
            return losses
    raise AssertionError


@pytest.mark.parametrize("axes", [{"replicate": 2}, pytest.param({"shard": 2}, marks=pytest.mark.soak)])
def test_samples_move_to_the_faster_rank_and_a_resumed_session_repeats_it(
    two: RankPool, axes: dict[str, int], tmp_path: Path
) -> None:
    first, second = two.run(resumed, axes, tmp_path)
    for name in ("losses", "shares", "decisions", "again"):
        assert first[name] == second[name], f"{name} differ between ranks"
    assert first["shares"][0] == (1, 1)
    assert first["shares"][-1] == (8, 4)
    (change,) = [decision for decision in first["decisions"] if decision.first is not None]
    assert change.step == 5
    assert change.first == 7  # batches 5 and 6 may have been loaded before
    assert first["losses"] == pytest.approx(one_process(), rel=1e-12)
    assert first["again"] == (first["losses"][6:], first["shares"][6:])
    assert first["equal"]
    assert first["more"][-1] == (6, 6)  # it goes on adapting


def by_prepared_loader(rank: int, size: int) -> Any:
    adaptive = session_with({"axes": {"replicate": 2}, "shares": "adaptive"})
    fixed = session_with({"axes": {"shard": 2}, "memory": {"accumulation": 3}, "shares": [9, 3]})
    return train(adaptive, (1.0, 0.5)[rank], STEPS, prepared=True), losses_of_loader(fixed)


def losses_of_loader(session: Session) -> list[tuple[float, int]]:
    """The losses of an epoch, and how many samples this rank had."""
    batches = session.prepare(DataLoader(data(), BATCH))
    return [(float(session.step(batch)), batches.samples) for batch in batches]


def test_batches_of_a_prepared_loader_follow_the_speeds_or_fixed_shares(two: RankPool) -> None:
    (adaptive, fixed), (adaptive_1, fixed_1) = two.run(by_prepared_loader)
    assert adaptive == adaptive_1
    assert adaptive[1][-1] == (8, 4)
    alone = losses_of_loader(session_with({}))
    losses = [loss for loss, _ in alone]
    assert adaptive[0][: len(alone)] == pytest.approx(losses, rel=1e-12)
    assert [loss for loss, _ in fixed] == [loss for loss, _ in fixed_1] == pytest.approx(losses, rel=1e-12)
    sizes = [(first, second) for (_, first), (_, second) in zip(fixed, fixed_1, strict=True)]
    assert sizes == [(9, 3)] * 8 + [(3, 1)]  # the last batch has four samples


def many_changes(rank: int, size: int) -> list[tuple[int, ...]]:
    session = session_with({"axes": {"replicate": 2}, "shares": "adaptive"})
    assert session.shares is not None
    session.shares.repeat(ShareDecision(number, 10 + number, (1 + number, 1), ()) for number in range(200))
    return [session.shares.table.at(batch) for batch in (9, 10, 77, 500)]


def test_any_number_of_changes_is_repeated(two: RankPool) -> None:
    assert two.run(many_changes)[0] == [(1, 1), (1, 1), (68, 1), (200, 1)]


def other_loader(rank: int, size: int) -> str:
    session = session_with({"axes": {"replicate": 2}, "shares": "adaptive"})
    x, y = data()[rank * 6 : rank * 6 + 6]
    with pytest.raises(InputError) as refusal:
        session.step((x, y))
    with pytest.raises(InputError, match=r"shares.adaptive measures the steps of session.step"):
        session.forward((x, y))
    return str(refusal.value)


def test_batches_that_the_session_does_not_divide_are_refused(two: RankPool) -> None:
    assert "none of session.batches(dataset) or session.prepare(loader)" in two.run(other_loader)[0]


def test_gpus_that_exchange_in_the_forward_pass_cannot_be_measured() -> None:
    check_rules(Plan.model_validate({"axes": {"replicate": 2}, "shares": "adaptive"}), device="cuda")
    with pytest.raises(InputError, match=r"GPUs exchange data in the forward pass of the plan \(shard 2"):
        check_rules(Plan.model_validate({"axes": {"shard": 2}, "shares": "adaptive"}), device="cuda")
