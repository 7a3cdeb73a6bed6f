"""Shares follow recorded speeds: of ranks that differ, of a neighbour that comes and goes, and with noise."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.plan_fields.shares import share_sizes
from meshwright.train.shares.adaptive import WINDOW
from meshwright.train.shares.controller import SpeedState, decide, observe, whole_shares

LEAD = 6  # batches that loaders are ahead
Speeds = Callable[[int, int], float]  # samples/s of a rank at a step


@dataclass
class Run:
    """What happened: the seconds of all steps with the shares of the controller, with even ones, and with the best ones
    of each step; the shares of every step; and the steps after which they changed."""

    seconds: float = 0.0
    even_seconds: float = 0.0
    best_seconds: float = 0.0
    shares: list[tuple[int, ...]] = field(default_factory=list)
    changes: list[int] = field(default_factory=list)


def replay(
    speeds: Speeds, ranks: int, batch: int, steps: int, noise: float = 0.0, fixed_s: float | tuple[float, ...] = 0.0
) -> Run:
    """Runs the controller on the speeds of a run. A rank needs `fixed_s` for a step besides its samples."""
    fixed = fixed_s if isinstance(fixed_s, tuple) else (fixed_s,) * ranks
    draw = random.Random(1)
    even = share_sizes(batch, [1] * ranks)
    shares, state, run = tuple(even), SpeedState(), Run()
    later: tuple[int, tuple[int, ...]] | None = None
    window: list[list[float]] = []
    for step in range(steps):
        if later is not None and step >= later[0]:
            shares, later = later[1], None
        now = [speeds(rank, step) for rank in range(ranks)]
        exact = [n / speed + more for n, speed, more in zip(shares, now, fixed, strict=True)]
        times = [time * math.exp(draw.gauss(0, noise)) for time in exact]
        run.seconds += max(times)
        run.even_seconds += max(n / speed + more for n, speed, more in zip(even, now, fixed, strict=True))
        run.best_seconds += batch / sum(now) + max(fixed)
        run.shares.append(shares)
        window.append([n / time for n, time in zip(shares, times, strict=True)])
        if (step + 1) % WINDOW == 0:
            measured = [median(of_rank) for of_rank in zip(*window, strict=True)]
            state = observe(state, measured, shares if len(set(run.shares[-WINDOW:])) == 1 else None)
            state, new = decide(state, later[1] if later else shares, 1, -(-LEAD // WINDOW))
            window = []
            if new is not None:
                later = (step + 1 + LEAD, new)
                run.changes.append(step + 1)
    assert all(sum(shares) == batch and min(shares) >= 1 for shares in run.shares)
    return run


def half_speed(rank: int, step: int) -> float:
    return 0.5 if rank == 1 else 1.0


def neighbour(period: int, slowed: float = 0.5) -> Speeds:
    """Rank 1 is slow in the second half of every period."""
    return lambda rank, step: slowed if rank == 1 and step % period >= period // 2 else 1.0


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.1])
@pytest.mark.parametrize("fixed_s", [0.0, 10.0])
def test_shares_are_found_within_fifty_steps_from_even_ones(noise: float, fixed_s: float) -> None:
    run = replay(half_speed, 2, 64, 300, noise, fixed_s)
    assert all(abs(shares[0] - 43) <= 2 for shares in run.shares[50:])
    assert len(run.changes) <= 4


@pytest.mark.parametrize(("ranks", "noise"), [(2, 0.1), (8, 0.1), (64, 0.05)])
def test_noise_moves_no_samples(ranks: int, noise: float) -> None:
    assert len(replay(lambda rank, step: 1.0, ranks, 32 * ranks, 1000, noise).changes) <= 2


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_rank_that_is_suddenly_slower_gets_fewer_samples_and_keeps_them(noise: float) -> None:
    run = replay(lambda rank, step: 0.5 if rank == 1 and step >= 100 else 1.0, 2, 64, 400, noise)
    assert run.shares[99] == (32, 32)
    assert all(abs(shares[0] - 43) <= 2 for shares in run.shares[150:])
    assert len([step for step in run.changes if step > 150]) <= 1


def test_a_rank_that_nearly_stops_keeps_a_sample_and_gets_its_share_back() -> None:
    run = replay(lambda rank, step: 0.01 if rank == 3 and 100 <= step < 200 else 1.0, 4, 64, 400)
    assert run.shares[150] == (21, 21, 21, 1)
    assert max(run.shares[-1]) - min(run.shares[-1]) <= 1


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.1])
@pytest.mark.parametrize("period", [4, 10, 14, 20, 30, 40, 60, 100, 150, 200])
def test_a_neighbour_that_comes_and_goes_often_moves_few_samples(period: int, noise: float) -> None:
    run = replay(neighbour(period), 2, 64, 4000, noise)
    assert len(run.changes) <= (4000 / 100 if period <= 150 else 4 * 4000 / period)
    assert run.seconds <= 0.97 * run.even_seconds * (1 + noise / 2)


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("period", [400, 1000])
def test_a_neighbour_that_stays_for_long_is_followed(period: int, noise: float) -> None:
    run = replay(neighbour(period), 2, 64, 4000, noise)
    assert run.seconds <= 1.1 * run.best_seconds
    ends = [shares for step, shares in enumerate(run.shares) if step % period in (period // 2 - 1, period - 1)]
    assert all(abs(shares[0] - expected) <= 3 for shares, expected in zip(ends, [32, 43] * len(ends), strict=False))
    assert len(run.changes) <= 6 * 4000 / period


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05, 0.1])
@pytest.mark.parametrize("fixed_s", [(0.0, 300.0), (100.0, 400.0), (1000.0, 1400.0)])
def test_a_rank_that_takes_as_long_with_fewer_samples_gets_its_samples_back(
    fixed_s: tuple[float, ...], noise: float
) -> None:
    run = replay(lambda rank, step: 1.0, 2, 64, 3000, noise, fixed_s)
    assert all(16 <= shares[1] <= 40 for shares in run.shares[50:])
    assert len(run.changes) <= 20
    assert sum(shares == (32, 32) for shares in run.shares) > 2000


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_large_part_that_does_not_depend_on_samples_is_found(noise: float) -> None:
    run = replay(half_speed, 2, 64, 400, noise, fixed_s=60.0)
    assert all(abs(shares[0] - 43) <= 3 for shares in run.shares[60:])
    assert len(run.changes) <= 5


@given(
    st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=9),
    st.integers(1, 3),
    st.integers(0, 100),
)
def test_no_rank_is_left_without_samples(speeds: list[float], least: int, more: int) -> None:
    batch = least * len(speeds) + more
    shares = whole_shares(batch, speeds, least)
    assert sum(shares) == batch
    assert min(shares) >= least
    ordered = sorted(zip(speeds, shares, strict=True))
    assert all(slow[1] <= fast[1] + 1 for slow, fast in pairwise(ordered))


def test_a_state_is_read_back_from_a_checkpoint() -> None:
    state = SpeedState()
    for speeds in ([1.0, 1.0], [1.0, 0.5], [1.1, 0.5]):
        state = observe(state, speeds, (32, 32))
    state, new = decide(state, (32, 32), 1, 2)
    assert new is not None
    state = observe(state, [1.0, 0.5], new)
    assert state.change is not None
    assert state.change.windows == 1
    assert SpeedState.from_plain(state.to_plain()) == state
