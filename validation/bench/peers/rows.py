"""From the measurements of all rounds to the rows of the table. A contestant is ranked only if it has trained: if its
final loss is that of our plan, within a tolerance that depends on the precision."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from validation.bench.peers.catalog import REFERENCE

# How far a final loss may be from ours, relative to ours. All train on the same batches from the same weights, so only
# rounding differs; in bf16 it differs by more.
TOLERANCES = {"fp32": 0.05, "bf16": 0.1}


@dataclass(frozen=True)
class Contestant:
    """One line of the table: a peer or ourselves, with its settings (`defaults`, `best`, or what our plan may change),
    and `how` it trains."""

    name: str
    settings: str
    how: str


@dataclass(frozen=True)
class Measurement:
    """What one run of a contestant has measured. `first_loss` is None for our own runs, which do not report it."""

    samples_per_s: float
    final_loss: float
    first_loss: float | None = None


@dataclass(frozen=True)
class PeerRow:
    """The result of one contestant.

    samples_per_s  the median over the rounds
    ratio          the median over the rounds of its samples per second divided by those of plain DDP at its defaults
    spread         the lowest and the highest ratio of a round
    final_loss     that of the round in which it was farthest from ours; None if it is NaN or infinite
    loss_error     how far the final loss is from ours, relative to ours; None if one of the two is NaN or infinite
    is_ranked      whether `loss_error` is within the tolerance
    """

    name: str
    settings: str
    how: str
    samples_per_s: float
    ratio: float
    spread: tuple[float, float]
    rounds: int
    final_loss: float | None
    loss_error: float | None
    is_ranked: bool


def make_rows(
    measured: Mapping[Contestant, Sequence[Measurement]], ours: Contestant, reference: Contestant, tolerance: float
) -> list[PeerRow]:
    """Returns a row for each contestant: first those that are ranked, the fastest first, then the others. `ours` has
    the loss that all are compared with, and `reference` the speed."""
    our_loss = median(run.final_loss for run in measured[ours])
    reference_rates = [run.samples_per_s for run in measured[reference]]
    rows = []
    for contestant, runs in measured.items():
        ratios = [run.samples_per_s / rate for run, rate in zip(runs, reference_rates, strict=True)]
        final_loss = max((run.final_loss for run in runs), key=lambda loss: _error(loss, our_loss))
        error = _error(final_loss, our_loss)
        rows.append(
            PeerRow(
                name=contestant.name,
                settings=contestant.settings,
                how=contestant.how,
                samples_per_s=median(run.samples_per_s for run in runs),
                ratio=median(ratios),
                spread=(min(ratios), max(ratios)),
                rounds=len(runs),
                final_loss=_finite_or_none(final_loss),
                loss_error=_finite_or_none(error),
                is_ranked=error <= tolerance,
            )
        )
    return sorted(rows, key=lambda row: (not row.is_ranked, -row.ratio))


def _error(loss: float, our_loss: float) -> float:
    """Returns the relative difference; infinity if one of the losses is NaN or infinite."""
    if not (math.isfinite(loss) and math.isfinite(our_loss)):
        return math.inf
    return abs(loss - our_loss) / max(abs(our_loss), 1e-12)


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class PeerReport:
    """The whole result. `left_out` has the reason for each peer that was not measured, by name. `first_loss` is that of
    plain DDP. `versions` are those of the peers' packages."""

    rows: Sequence[PeerRow]
    left_out: Mapping[str, str]
    ours: Contestant
    tolerance: float
    first_loss: float
    final_loss: float
    ranks: int
    steps: int
    precision: str
    versions: Mapping[str, str]

    @property
    def has_learned(self) -> bool:
        """Whether our loss fell by more than the tolerance. Otherwise a peer that has not trained would not be
        noticed."""
        return self.first_loss - self.final_loss > self.tolerance * abs(self.first_loss)

    def summary(self) -> dict[str, Any]:
        """Returns our ratio to plain DDP, and to the fastest ranked peer at its defaults and at its best. Each is None
        if we or all such peers are not ranked."""
        ranked = [row for row in self.rows if row.is_ranked]
        own = next((row for row in ranked if (row.name, row.settings) == (self.ours.name, self.ours.settings)), None)
        summary: dict[str, Any] = {"ours_to_ddp": round(own.ratio, 4) if own else None}
        for settings in ("defaults", "best"):
            fastest = next((row for row in ranked if row.settings == settings), None)  # rows are sorted by speed
            summary[f"fastest_at_{settings}"] = fastest.name if fastest else None
            ratio = round(own.ratio / fastest.ratio, 4) if own and fastest else None
            summary[f"ours_to_fastest_at_{settings}"] = ratio
        return summary

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "summary": self.summary(), "has_learned": self.has_learned}


def report_lines(report: PeerReport) -> list[str]:
    lines = [
        f"{report.ranks} ranks, {report.precision}, {report.steps} steps;"
        f" ratios of samples/s to {REFERENCE.title} at its defaults; {_versions(report.versions)}"
    ]
    widths = [max(len(cell) for cell in cells) for cells in zip(*(_cells(row) for row in report.rows), strict=True)]
    for row in report.rows:
        cells = "  ".join(f"{cell:{width}}" for cell, width in zip(_cells(row), widths, strict=True))
        lines.append(f"{cells}  {_verdict(row, report)}".rstrip())
    lines += [f"{name}: left out: {reason}" for name, reason in report.left_out.items()]
    if not report.has_learned:
        lines.append(
            f"the loss went from {report.first_loss:.4g} to {report.final_loss:.4g}, less than the tolerance of"
            f" {report.tolerance:.0%}: a peer that does not train would not be noticed, so raise --steps"
        )
    return lines


def _cells(row: PeerRow) -> tuple[str, ...]:
    low, high = row.spread
    return (
        row.name,
        row.settings,
        f"ratio {row.ratio:.3f} ({low:.3f} to {high:.3f}, {row.rounds} rounds)",
        f"{row.samples_per_s:,.0f} samples/s",
        "loss not finite" if row.final_loss is None else f"loss {row.final_loss:.4f}",
    )


def _verdict(row: PeerRow, report: PeerReport) -> str:
    if row.is_ranked:
        return row.how
    if row.loss_error is None:
        return f"not ranked: ours is {report.final_loss:.4f}"
    return f"not ranked: {row.loss_error:.1%} from our loss {report.final_loss:.4f}, tolerance {report.tolerance:.0%}"


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
