"""Decides how the ranks of a run divide a global batch, from the speeds that were measured of each of them. It imports
no torch and keeps no state of its own: `observe` and `decide` are functions of what is passed in.

    speed of a rank    samples / seconds of its own computation, one measurement per window of steps
    smoothed speed     s ← s^(1-w) · v^w,  w = 1 / (1 + patience)                                          observe
    seconds(n)         max over ranks of n_r / s_r: the time of a step with shares n                       step_seconds
    best shares        in proportion to s, whole samples, at least `least` of each rank                    best_shares
    gain               1 - seconds(best shares) / seconds(shares)

Shares change if the gain is larger than `SMALLEST_GAIN` and than what the noise of the measurements may feign. After a
change, the next one waits until its effect is measured. Each change that takes back half of the one before it, or more,
doubles the patience: speeds are then averaged over more windows, and the next change waits longer. Quiet windows halve
it again. Therefore shares follow a neighbour that stays for long, and end between its two speeds if it comes and goes
often.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median_low
from typing import Any

from meshwright.plan_fields.shares import share_sizes

SMALLEST_GAIN = 0.04
_NOISE_WEIGHT = 0.2
_LARGEST_NOISE = 0.2  # a larger distance is a speed that has changed
_MOST_PATIENCE = 32
_QUIET_WINDOWS = (8, 4)  # patience is halved after 8 windows without a change, and 4 more for each unit of it
_NUMERATOR = 1 << 20  # speeds become whole proportions of this resolution


@dataclass(frozen=True)
class SpeedState:
    """What is known after some windows. `speeds` are smoothed samples/s by rank; empty before the first window.
    `noise` is the usual relative distance of a measurement from the smoothed speed. `wait` is the number of windows
    before shares may change again. `quiet` counts windows since the last change, or since patience was last halved.
    `move` is the number of samples that each rank got more in the last change."""

    speeds: tuple[float, ...] = ()
    noise: float = 0.0
    patience: int = 1
    wait: int = 0
    quiet: int = 0
    move: tuple[int, ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """The state as values that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> "SpeedState":
        lists = {name: tuple(values[name]) for name in ("speeds", "move")}
        return cls(**{**values, **lists})


def observe(state: SpeedState, measured: Sequence[float]) -> SpeedState:
    """Returns the state after one more window. `measured` are the ranks' samples/s; 0 if a rank had no sample."""
    if not state.speeds:
        known = [speed for speed in measured if speed > 0]
        usual = sorted(known)[len(known) // 2] if known else 1.0
        return replace(state, speeds=tuple(speed if speed > 0 else usual for speed in measured))
    weight = 1 / (1 + state.patience)
    logs = [math.log(now / before) if now > 0 else 0.0 for now, before in zip(measured, state.speeds, strict=True)]
    speeds = tuple(before * math.exp(weight * log) for before, log in zip(state.speeds, logs, strict=True))
    noise = state.noise + _NOISE_WEIGHT * (min(_LARGEST_NOISE, median_low(map(abs, logs))) - state.noise)
    return replace(state, speeds=speeds, noise=noise, wait=max(0, state.wait - 1), quiet=state.quiet + 1)


def decide(
    state: SpeedState, samples: Sequence[int], least: int, delay: int
) -> tuple[SpeedState, tuple[int, ...] | None]:
    """Returns the state, and the new shares or None if they stay. `samples` are the present shares, whose sum is the
    global batch. `least` is the smallest number of samples of a rank. `delay` is the number of windows that pass before
    a change takes effect."""
    if not state.speeds or state.wait:
        return state, None
    best = best_shares(sum(samples), state.speeds, least)
    gain = 1 - step_seconds(best, state.speeds) / step_seconds(samples, state.speeds)
    if gain <= max(SMALLEST_GAIN, feigned_gain(state)):
        if state.quiet >= _QUIET_WINDOWS[0] + _QUIET_WINDOWS[1] * state.patience:
            state = replace(state, patience=max(1, state.patience // 2), quiet=0)
        return state, None
    move = tuple(new - old for new, old in zip(best, samples, strict=True))
    common = sum(new * old for new, old in zip(move, state.move, strict=False))
    takes_back = common < 0 and -2 * common >= sum(old * old for old in state.move)
    patience = min(_MOST_PATIENCE, 2 * state.patience) if takes_back else state.patience
    return replace(state, patience=patience, wait=delay + patience, quiet=0, move=move), best


def feigned_gain(state: SpeedState) -> float:
    """The largest gain that noise is likely to feign: the slowest of more ranks is further from the mean. Half of the
    smoothed speeds' noise is in `noise`, which is a small quantile of it."""
    weight = 1 / (1 + state.patience)
    smoothed = 2 * state.noise * math.sqrt(weight / (2 - weight))
    return smoothed * (1 + math.sqrt(2 * math.log(len(state.speeds))))


def step_seconds(samples: Sequence[int], speeds: Sequence[float]) -> float:
    """The time of a step, in which every rank waits for the slowest one."""
    return max(share / speed for share, speed in zip(samples, speeds, strict=True))


def best_shares(batch: int, speeds: Sequence[float], least: int) -> tuple[int, ...]:
    """Divides a batch in proportion to the speeds. Each rank gets at least `least` samples; the batch has as many."""
    fastest = max(speeds)
    proportions = [max(1, round(_NUMERATOR * speed / fastest)) for speed in speeds]
    shares = dict.fromkeys(range(len(speeds)), 0)
    below: set[int] = set()
    while True:  # ranks that would get fewer than `least` get exactly that, and the others divide the rest
        others = [rank for rank in shares if rank not in below]
        sizes = share_sizes(batch - least * len(below), [proportions[rank] for rank in others])
        shares.update({**dict.fromkeys(below, least), **dict(zip(others, sizes, strict=True))})
        new = {rank for rank in others if shares[rank] < least}
        if not new:
            return tuple(shares.values())
        below |= new
