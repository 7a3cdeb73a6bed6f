"""The section of a run's page on adaptive shares: how many samples of a batch each rank got, and how fast it was."""

from collections.abc import Iterator
from typing import Any

from meshwright.plan_fields.shares import describe_shares
from meshwright.report.charts import axis, colour, figure, line
from meshwright.report.page import Chart, Section, Table
from meshwright.report.run.record import RunRecord
from meshwright.train.output.times.share_changes import describe_speeds, read_decisions
from meshwright.train.shares.adaptive import ShareDecision

_MOST_LINES = 16  # ranks in the chart
_MOST_ROWS = 200


def share_sections(run: RunRecord) -> Iterator[Section]:
    """Yields the section; none for a run whose shares are fixed."""
    if run.plan is None or not run.plan.shares.adaptive:
        return
    changes = [decision for decision in read_decisions(run.folder.shares) if decision.first is not None]
    begin = run.plan.shares.samples
    text = (
        f"Shares began {f'as {describe_shares(begin)}' if begin else 'even'} and changed"
        f" {len(changes)} {'time' if len(changes) == 1 else 'times'}. The speed of a rank is what it computes alone,"
        " without the time in which it waits for others."
    )
    yield Section("Shares", text, [_chart(run, changes), _table(changes)] if changes else [])


def _chart(run: RunRecord, changes: list[ShareDecision]) -> Chart:
    """The shares of each rank over the run, in percent of a batch."""
    ranks = min(_MOST_LINES, len(changes[0].samples))
    begin = run.plan.shares.samples if run.plan is not None else ()
    shares = [begin or (1,) * len(changes[0].samples), *(change.samples for change in changes)]
    starts = [0, *(change.first or 0 for change in changes)]
    ends = [*starts[1:], max(run.step, starts[-1] + 1)]
    steps = [step for start, end in zip(starts, ends, strict=True) for step in (start + 1, end)]
    traces = []
    for rank in range(ranks):
        percent = [100 * samples[rank] / sum(samples) for samples in shares for _ in range(2)]
        traces.append(line(f"rank {rank}", steps, percent, "step %{x:,}: %{y:.3g}%", colour(rank)))
    return Chart("Shares over time", figure(traces, axis("step"), axis("% of a batch", rangemode="tozero")))


def _table(changes: list[ShareDecision]) -> Table:
    rows: list[list[Any]] = [
        [change.step, (change.first or 0) + 1, describe_shares(change.samples), describe_speeds(change.speeds)]
        for change in changes[-_MOST_ROWS:]
    ]
    return Table(
        ["decided after step", "first step", "samples by data rank", "samples/s of each alone"], rows, "Changes"
    )
