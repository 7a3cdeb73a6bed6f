"""The result of the strategies benchmark: rows, the strategies that were not run, and the summary."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.bench.figures import SpeedFigure, automatic_over_manual, precision_gains
from meshwright.bench.strategies.catalog import AUTO, SINGLE


@dataclass(frozen=True)
class StrategyRow:
    """What was measured and predicted for one strategy. What was not measured is None.

    how                  the plan's summary, or the number of processes and threads
    ranks                the number of devices
    samples_per_s        the global batch divided by `measured_step_s`
    speedup, efficiency  compared with the single device in the same precision (figures.py)
    exchanged_bytes      the bytes that all ranks together send to each other in a step
    shares               of the ranks' time: computing, communicating, waiting, bubble; they add up to 1
    peak_memory_bytes    of the process that needs most: resident on CPUs, allocated on GPUs
    measured_step_s      the median over the rounds of the seconds of a step
    spread               (highest - lowest) / median of the rounds; None for one round
    loss                 of the last timed step, which is the same step for all strategies
    loss_difference      relative, from the loss of the single device in the same precision; the single device itself is
                         compared with fp32
    loss_tolerance       the largest difference that the numerics of the row explain
    loss_agrees          whether the difference is within the tolerance
    note                 why the loss differs by design; in a prediction, why the strategy does not fit
    """

    strategy: str
    how: str
    ranks: int
    precision: str
    samples_per_s: float | None
    speedup: float | None
    efficiency: float | None
    exchanged_bytes: float | None
    shares: dict[str, float] | None
    peak_memory_bytes: int | None
    predicted_step_s: float | None
    predicted_speedup: float | None
    predicted_memory_bytes: int | None
    measured_step_s: float | None
    spread: float | None
    rounds: int
    loss: float | None
    loss_difference: float | None
    loss_tolerance: float | None
    loss_agrees: bool | None
    note: str | None = None


@dataclass(frozen=True)
class SkippedStrategy:
    """A strategy with which this job cannot be trained, or whose training failed, and the reason."""

    strategy: str
    ranks: int
    precision: str
    reason: str


@dataclass(frozen=True)
class StrategyReport:
    """The result of the benchmark. `steps` is the number of timed steps of one measurement; None if nothing was
    measured. `seconds` is how long the benchmark took."""

    job: str
    cluster: str
    global_batch: int
    steps: int | None
    seconds: float
    rows: tuple[StrategyRow, ...]
    skipped: tuple[SkippedStrategy, ...]

    @property
    def is_measured(self) -> bool:
        return self.steps is not None

    def figures(self) -> list[SpeedFigure]:
        """Returns the seconds of a step of all rows whose loss is right: measured, or predicted if nothing was
        measured."""
        rows = [row for row in self.rows if row.loss_agrees is not False]
        times = [(row, row.measured_step_s if self.is_measured else row.predicted_step_s) for row in rows]
        return [SpeedFigure(row.strategy, row.ranks, row.precision, time) for row, time in times if time is not None]

    def summary(self) -> dict[str, Any]:
        """Returns the derived figures: the speed-up and efficiency of each strategy, the fastest one, and the gains."""
        figures = self.figures()
        fastest = min(figures, key=lambda figure: figure.step_s, default=None)
        errors = [
            row.predicted_step_s / row.measured_step_s - 1
            for row in self.rows
            if row.predicted_step_s is not None and row.measured_step_s is not None
        ]
        return {
            "fastest": None if fastest is None else asdict(fastest),
            "speedup": {_key(row): _speedup(row, self.is_measured) for row in self.rows},
            "efficiency": {_key(row): row.efficiency for row in self.rows},
            "mixed_precision_gain": precision_gains(figures),
            "automatic_over_manual": dict(automatic_over_manual(figures, AUTO, (SINGLE,))),
            "prediction_error_median": _median_size(errors),
            "losses_differ": [_key(row) for row in self.rows if row.loss_agrees is False],
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "strategies",
            "job": self.job,
            "cluster": self.cluster,
            "global_batch": self.global_batch,
            "steps": self.steps,
            "seconds": round(self.seconds, 1),
            "rows": [asdict(row) for row in self.rows],
            "summary": self.summary(),
            "skipped": [asdict(strategy) for strategy in self.skipped],
        }


def _key(row: StrategyRow) -> str:
    return f"{row.strategy}, {row.ranks} {'rank' if row.ranks == 1 else 'ranks'}, {row.precision}"


def _speedup(row: StrategyRow, is_measured: bool) -> float | None:
    return row.speedup if is_measured else row.predicted_speedup


def _median_size(errors: Sequence[float]) -> float | None:
    sizes = sorted(map(abs, errors))
    return sizes[len(sizes) // 2] if sizes else None
