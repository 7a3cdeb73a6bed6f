"""Decides how the ranks of a run divide a global batch, from the speeds that were measured of each of them. It imports
no torch and keeps no state of its own: `observe` and `decide` are functions of what is passed in.

    speed of a rank    samples / seconds of its own computation, one measurement per window of steps
    smoothed speed     s ← s^(1-w) · v^w,  w = 1 / (1 + patience)                                          observe
    seconds(n)         m / s · (1 - e + e · n / m) for n below the present m samples, n / s above          _Rank.seconds
    best shares        the whole numbers whose slowest rank is fastest, at least `least` of each rank      best_shares
    gain               1 - seconds of the slowest rank with the best shares / the same with the present ones

The elasticity e is the part of a rank's seconds that gets shorter with its samples. It is assumed to be 1, and measured
with each change (`_judge`). A change after which the slowest rank takes as long as before has no use, and is taken
back: such a rank waits for its host, or shares its device. What was measured is forgotten slowly, so that it is tried
again.

Shares change if the gain is larger than `SMALLEST_GAIN` and than what the noise of the measurements may feign. After a
change, the next one waits until its effect is measured. Taking back half of the last changes, or more, doubles the
patience: speeds are then averaged over more windows, and the next change waits longer. Quiet windows halve
it again. Therefore shares follow a neighbour that stays for long, and end between its two speeds if it comes and goes
often.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median_low
from typing import Any, NamedTuple

from meshwright.plan_fields.shares import share_sizes

SMALLEST_GAIN = 0.04
_NOISE_WEIGHT = 0.2
_LARGEST_NOISE = 0.2  # a larger distance is a speed that has changed
_MOST_PATIENCE = 32
_QUIET_WINDOWS = (8, 4)  # patience is halved after 8 windows without a change, and 4 more for each unit of it
_LEAST_ELASTICITY = 0.25  # a rank of which a smaller part of its seconds follows its samples keeps its samples
_MEMORY = 32  # windows in which 63% of what was measured of an elasticity is forgotten, for each unit of patience
_CERTAIN = 3  # a change is judged if it is this many times as large as the error of its measured effect
_NUMERATOR = 1 << 20  # proportions become whole numbers of this resolution
_LISTS = ("speeds", "measured", "samples", "move", "move_before", "elasticities")  # of a `SpeedState`


@dataclass(frozen=True)
class Change:
    """A change of the shares whose effect is being measured: the shares before and after it, the `seconds` of every
    rank before it, and what was measured since it took effect: in `windows` windows, the sum of the logarithms of every
    rank's seconds."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    seconds: tuple[float, ...]
    log_seconds: tuple[float, ...]
    windows: int = 0

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> "Change":
        lists = {name: tuple(values[name]) for name in ("before", "after", "seconds", "log_seconds")}
        return cls(**{**values, **lists})


@dataclass(frozen=True)
class SpeedState:
    """What is known after some windows. `speeds` are smoothed samples/s by rank; empty before the first window.
    `noise` is the usual relative distance of a measurement from the one before it with the same shares. `wait` is the
    number of windows before shares may change again. `quiet` counts windows since the last change, or since
    patience was last halved. `move` is the number of samples that each rank got more in the last changes that went in
    one direction, and `move_before` the same of those before them, until they are taken back. `change` is the last
    change until it is judged. `elasticities` are the parts of the ranks' seconds that follow their samples. `measured`
    are the speeds of the last window, and `samples` its shares; empty if they changed within it."""

    speeds: tuple[float, ...] = ()
    measured: tuple[float, ...] = ()
    samples: tuple[int, ...] = ()
    noise: float = 0.0
    patience: int = 1
    wait: int = 0
    quiet: int = 0
    move: tuple[int, ...] = ()
    move_before: tuple[int, ...] = ()
    elasticities: tuple[float, ...] = ()
    change: Change | None = None

    def to_plain(self) -> dict[str, Any]:
        """The state as values that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> "SpeedState":
        lists = {name: tuple(values[name]) for name in _LISTS}
        change = values["change"]
        return cls(**{**values, **lists, "change": Change.from_plain(change) if change else None})


def observe(state: SpeedState, measured: Sequence[float], samples: Sequence[int] | None) -> SpeedState:
    """Returns the state after one more window. `measured` are the ranks' samples/s; 0 if a rank had no sample.
    `samples` are the shares of the window; None if they changed within it."""
    if not state.speeds:
        known = [speed for speed in measured if speed > 0]
        usual = sorted(known)[len(known) // 2] if known else 1.0
        speeds = tuple(speed if speed > 0 else usual for speed in measured)
        return replace(
            state, speeds=speeds, measured=speeds, samples=tuple(samples or ()), elasticities=(1.0,) * len(speeds)
        )
    weight = 1 / (1 + state.patience)
    logs = [math.log(now / before) if now > 0 else 0.0 for now, before in zip(measured, state.speeds, strict=True)]
    speeds = tuple(before * math.exp(weight * log) for before, log in zip(state.speeds, logs, strict=True))
    noise = state.noise
    if samples is not None and tuple(samples) == state.samples:
        changes = [abs(math.log(now / before)) for now, before in zip(measured, state.measured, strict=True) if now > 0]
        noise += _NOISE_WEIGHT * (min(_LARGEST_NOISE, median_low(changes or [0.0])) - noise)
    kept = math.exp(-1 / (_MEMORY * state.patience))
    return replace(
        state,
        speeds=speeds,
        measured=tuple(now if now > 0 else known for now, known in zip(measured, state.measured, strict=True)),
        samples=tuple(samples or ()),
        noise=noise,
        wait=max(0, state.wait - 1),
        quiet=state.quiet + 1,
        elasticities=tuple(1 - kept * (1 - elasticity) for elasticity in state.elasticities),
        change=_measured_change(state.change, measured, samples),
    )


def _measured_change(change: Change | None, measured: Sequence[float], samples: Sequence[int] | None) -> Change | None:
    """Adds a window to what is known of a change, if its shares were those of the window."""
    if change is None or samples is None or tuple(samples) != change.after or min(measured) <= 0:
        return change
    log_seconds = tuple(
        known + math.log(share / speed)
        for known, share, speed in zip(change.log_seconds, samples, measured, strict=True)
    )
    return replace(change, log_seconds=log_seconds, windows=change.windows + 1)


def decide(
    state: SpeedState, samples: Sequence[int], least: int, delay: int
) -> tuple[SpeedState, tuple[int, ...] | None]:
    """Returns the state, and the new shares or None if they stay. `samples` are the present shares, whose sum is the
    global batch. `least` is the smallest number of samples of a rank. `delay` is the number of windows that pass before
    a change takes effect."""
    if not state.speeds or state.wait or min(samples) < 1:
        return state, None
    state, useless = _judge(state)
    if useless is not None and min(back := tuple(share_sizes(sum(samples), useless.before))) >= least:
        return _changed(state, samples, back, delay, judged=False), back
    ranks = [_Rank(*of_rank) for of_rank in zip(samples, state.speeds, state.elasticities, strict=True)]
    best = best_shares(ranks, least)
    gain = 1 - step_seconds(ranks, best) / step_seconds(ranks, samples)
    if gain <= max(SMALLEST_GAIN, feigned_gain(state)):
        if state.quiet >= _QUIET_WINDOWS[0] + _QUIET_WINDOWS[1] * state.patience:
            state = replace(state, patience=max(1, state.patience // 2), quiet=0, change=None)
        return state, None
    return _changed(state, samples, best, delay, judged=True), best


def _changed(
    state: SpeedState, samples: Sequence[int], new_samples: tuple[int, ...], delay: int, *, judged: bool
) -> SpeedState:
    """The state after a change of the shares was decided, whose effect will be `judged` or not."""
    move, before = tuple(new - old for new, old in zip(new_samples, samples, strict=True)), state.move_before
    if _product(move, state.move) < 0:
        before = state.move
    elif state.move:
        move = tuple(map(sum, zip(move, state.move, strict=True)))
    patience = state.patience
    if before and -2 * _product(move, before) >= _product(before, before):
        patience, before = min(_MOST_PATIENCE, 2 * patience), ()
    seconds = tuple(share / speed for share, speed in zip(samples, state.measured, strict=True))
    zeros = (0.0,) * len(seconds)
    change = None
    if judged:  # together with a change before it that was too small to be judged
        first = state.change or Change(tuple(samples), new_samples, seconds, zeros)
        change = Change(first.before, new_samples, first.seconds, zeros)
    return replace(
        state, patience=patience, wait=delay + patience, quiet=0, move=move, move_before=before, change=change
    )


def _product(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(one, other, strict=False))


def _judge(state: SpeedState) -> tuple[SpeedState, Change | None]:
    """Compares the seconds of the rank that was slowest before the last change with those after it. Returns the state
    with the elasticity of that rank, and the change if it was of no use. If the rank has become much slower with fewer
    samples, its speed has changed, and nothing is known about its elasticity. A change that is too small to be judged
    is kept."""
    change = state.change
    if change is None or not change.windows:
        return state, None
    slowest = max(range(len(change.seconds)), key=lambda rank: change.seconds[rank])
    fewer = math.log(change.after[slowest] / change.before[slowest])
    effect = change.log_seconds[slowest] / change.windows - math.log(change.seconds[slowest])
    error = 2 * state.noise * math.sqrt(1 / change.windows + 1)
    if fewer < 0 and -fewer < _CERTAIN * error:
        return state, None
    state = replace(state, change=None)
    if fewer >= 0 or effect > -fewer / 2:
        return state, None
    elasticity = min(1.0, max(0.0, effect / fewer))
    useless = elasticity < _LEAST_ELASTICITY
    samples = change.before if useless else change.after
    speeds, elasticities = list(state.speeds), list(state.elasticities)
    elasticities[slowest] = elasticity
    speeds[slowest] = samples[slowest] / change.seconds[slowest] / math.exp(0 if useless else effect)
    return replace(state, speeds=tuple(speeds), elasticities=tuple(elasticities)), change if useless else None


def feigned_gain(state: SpeedState) -> float:
    """The largest gain that noise is likely to feign: the slowest of more ranks is further from the mean. Half of the
    smoothed speeds' noise is in `noise`, which is a small quantile of it."""
    weight = 1 / (1 + state.patience)
    smoothed = 2 * state.noise * math.sqrt(weight / (2 - weight))
    return smoothed * (1 + math.sqrt(2 * math.log(len(state.speeds))))


class _Rank(NamedTuple):
    """A rank with its present samples and their samples/s."""

    samples: int
    speed: float
    elasticity: float = 1.0

    def seconds(self, samples: float) -> float:
        """The time for so many samples. With more samples than now it is assumed to be in proportion to them."""
        present = self.samples / self.speed
        elasticity = self.elasticity if samples < self.samples else 1.0
        return present * (1 - elasticity + elasticity * samples / self.samples)

    def samples_in(self, seconds: float) -> float:
        """The inverse of `seconds`. A rank whose seconds follow its samples only in part gives away half of them at
        most, and none if they hardly do."""
        ratio = seconds * self.speed / self.samples
        if ratio >= 1 or self.elasticity == 1:
            return self.samples * ratio
        if self.elasticity < _LEAST_ELASTICITY:
            return self.samples
        return self.samples * max(0.5, 1 - (1 - ratio) / self.elasticity)


def step_seconds(ranks: Sequence[_Rank], samples: Sequence[int]) -> float:
    """The time of a step, in which every rank waits for the slowest one."""
    return max(rank.seconds(share) for rank, share in zip(ranks, samples, strict=True))


def best_shares(ranks: Sequence[_Rank], least: int) -> tuple[int, ...]:
    """Divides the ranks' samples anew, so that the slowest of them is fastest. Each rank gets at least `least` samples;
    all together have as many."""
    batch = sum(rank.samples for rank in ranks)
    low, high = 0.0, max(rank.samples / rank.speed for rank in ranks)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(rank.samples_in(middle) for rank in ranks) >= batch else (middle, high)
    wanted = [rank.samples_in(high) for rank in ranks]
    return whole_shares(batch, wanted, least)


def whole_shares(batch: int, wanted: Sequence[float], least: int) -> tuple[int, ...]:
    """Divides a batch in proportion to `wanted`. Each rank gets at least `least` samples; the batch has as many."""
    largest = max(wanted)
    proportions = [max(1, round(_NUMERATOR * value / largest)) for value in wanted]
    shares = dict.fromkeys(range(len(wanted)), 0)
    below: set[int] = set()
    while True:  # ranks that would get fewer than `least` get exactly that, and the others divide the rest
        others = [rank for rank in shares if rank not in below]
        sizes = share_sizes(batch - least * len(below), [proportions[rank] for rank in others])
        shares.update({**dict.fromkeys(below, least), **dict(zip(others, sizes, strict=True))})
        new = {rank for rank in others if shares[rank] < least}
        if not new:
            return tuple(shares.values())
        below |= new
