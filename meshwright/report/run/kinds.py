"""What the time of a run's ranks went to, from the recorded windows of steps.

    computing            prepare + forward + backward + optimizer, without the time blocked in exchanges
    exchanging           of a window, the time that the rank which was blocked least was blocked
    waiting for others   the time that a rank was blocked beyond that: it had come to the exchange before the others
    waiting for data     from the end of a step to its next batch
    logging and other    writing metrics, callbacks

The rank that is blocked least comes last to the exchanges, and the others wait for it. What an exchange itself takes
cannot be less than what that rank is blocked, so the rest is waiting. Where ranks never wait for all others at the same
time, as in a pipeline, the split is an estimate.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from meshwright.report.run.record import RankTimes, Window
from meshwright.train.output.activity_times import EXCHANGE

COMPUTING, EXCHANGING, FOR_OTHERS, FOR_DATA, OTHER = (
    *("computing", "exchanging", "waiting for others", "waiting for data"),
    "logging and other",
)
KINDS = (COMPUTING, EXCHANGING, FOR_OTHERS, FOR_DATA, OTHER)
COLOURS = {
    COMPUTING: "var(--series-0)",
    EXCHANGING: "var(--series-1)",
    FOR_OTHERS: "var(--series-5)",
    FOR_DATA: "var(--series-2)",
    OTHER: "var(--series-7)",
}
_COMPUTING = ("prepare", "forward", "backward", "optimizer")
# What the terms of a prediction's breakdown are.
_PREDICTED = {
    **dict.fromkeys(("compute", "launch", "optimizer"), COMPUTING),
    **dict.fromkeys(
        ("context", "tensor", "pipeline", "shard", "replicate", "branches", "servers", "offload"), EXCHANGING
    ),
    "bubble": FOR_OTHERS,
    "input": FOR_DATA,
}


@dataclass(frozen=True)
class StepKinds:
    """The mean seconds of a step by kind, in the order of `KINDS`, of one rank in one window."""

    rank: int
    step: int
    steps: int
    time: float
    seconds: Mapping[str, float]


def kinds_of_windows(ranks: Mapping[int, RankTimes]) -> list[list[StepKinds]]:
    """Returns, for each window of steps, the kinds of all ranks that recorded it. A window that a run repeated after a
    restart is there twice."""
    by_window: dict[tuple[int, int, int], dict[int, Window]] = {}
    for rank, times in ranks.items():
        seen: dict[int, int] = {}
        for window in times.windows:
            repetition = seen.get(window.step, 0)
            seen[window.step] = repetition + 1
            by_window.setdefault((repetition, window.step, window.steps), {})[rank] = window
    rows = [_kinds(windows) for windows in by_window.values()]
    return sorted(rows, key=lambda row: row[0].time)


def _kinds(windows: Mapping[int, Window]) -> list[StepKinds]:
    exchange = min(_blocked(window) for window in windows.values())
    rows = []
    for rank, window in windows.items():
        values = window.seconds
        computing = sum(values.get(name, 0.0) for name in _COMPUTING) / window.steps
        data = values.get("data", 0.0) / window.steps
        total = sum(values.values()) / window.steps
        blocked = _blocked(window)
        seconds = {
            COMPUTING: computing,
            EXCHANGING: exchange,
            FOR_OTHERS: blocked - exchange,
            FOR_DATA: data,
            OTHER: max(0.0, total - computing - data - blocked),
        }
        rows.append(StepKinds(rank, window.step, window.steps, window.time, seconds))
    return rows


def _blocked(window: Window) -> float:
    return window.seconds.get(EXCHANGE, 0.0) / window.steps


def mean_kinds(rows: Iterable[StepKinds]) -> dict[str, float]:
    """The mean seconds of a step by kind, over all steps of these rows; empty without rows."""
    totals, steps = [0.0] * len(KINDS), 0
    for row in rows:
        steps += row.steps
        for number, seconds in enumerate(row.seconds.values()):  # in the order of KINDS
            totals[number] += seconds * row.steps
    return {kind: total / steps for kind, total in zip(KINDS, totals, strict=True)} if steps else {}


def kinds_by_rank(windows: Sequence[Sequence[StepKinds]]) -> dict[int, dict[str, float]]:
    """The mean seconds of a step by kind, for each rank."""
    rows: dict[int, list[StepKinds]] = {}
    for window in windows:
        for row in window:
            rows.setdefault(row.rank, []).append(row)
    return {rank: mean_kinds(rows[rank]) for rank in sorted(rows)}


def predicted_kinds(breakdown: Mapping[str, float]) -> dict[str, float]:
    """The seconds of a predicted step by the same kinds."""
    kinds = dict.fromkeys(KINDS, 0.0)
    for name, seconds in breakdown.items():
        kinds[_PREDICTED.get(name, OTHER)] += float(seconds)
    return kinds


@dataclass(frozen=True)
class RankSpeed:
    """How a rank compares with the others. `relative` is its computing time over the median of all ranks. `last_share`
    is the share of windows in which it was blocked least, so that the others waited for it."""

    rank: int
    computing_s: float
    waiting_s: float
    relative: float
    last_share: float


def rank_speeds(windows: Sequence[Sequence[StepKinds]]) -> list[RankSpeed]:
    """Returns the speed of every rank; empty for a single rank."""
    kinds = kinds_by_rank(windows)
    if len(kinds) < 2:
        return []
    typical = median(values[COMPUTING] for values in kinds.values())
    last = dict.fromkeys(kinds, 0)
    for window in windows:
        if len(window) > 1:
            last[min(window, key=lambda row: row.seconds[FOR_OTHERS]).rank] += 1
    counted = max(1, sum(last.values()))
    return [
        RankSpeed(
            rank,
            values[COMPUTING],
            values[FOR_OTHERS],
            values[COMPUTING] / typical if typical else 1.0,
            last[rank] / counted,
        )
        for rank, values in kinds.items()
    ]
