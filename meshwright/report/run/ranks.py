"""The sections of a run's page that compare ranks: time by kind, stragglers and memory."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from meshwright.numbers.units import bytes_text
from meshwright.report.charts import Number, axis, bars, colour, figure
from meshwright.report.page import Cell, Chart, Section, Table, TableCell
from meshwright.report.run.kinds import (
    COLOURS,
    COMPUTING,
    KINDS,
    StepKinds,
    kinds_by_rank,
    mean_kinds,
    rank_speeds,
)
from meshwright.report.run.record import RankTimes, RunRecord
from meshwright.train.output.times.stragglers import find_straggler

_MOST_COLUMNS = 240  # of charts over time with one column for each stretch of steps
_SLOW = 1.1  # a rank whose computing takes this much longer than the median is named
_GIB = 2**30


def rank_sections(run: RunRecord, windows: Sequence[Sequence[StepKinds]]) -> Iterator[Section]:
    """Yields the sections; none for a run that has not recorded its times."""
    if not windows:
        return
    stretches = _stretches(windows)
    yield _time_by_kind(run, windows, stretches)
    if len(run.ranks) > 1:
        yield _stragglers(run, windows, stretches)
    yield _memory(run)


def _stretches(windows: Sequence[Sequence[StepKinds]]) -> list[list[StepKinds]]:
    """At most `_MOST_COLUMNS` stretches, each of the same number of windows."""
    length = -(-len(windows) // _MOST_COLUMNS)
    return [
        [row for window in windows[begin : begin + length] for row in window]
        for begin in range(0, len(windows), length)
    ]


def _time_by_kind(
    run: RunRecord, windows: Sequence[Sequence[StepKinds]], stretches: Sequence[Sequence[StepKinds]]
) -> Section:
    by_rank = kinds_by_rank(windows)
    ranks = list(by_rank)
    per_rank = [
        bars(
            kind,
            ranks,
            [by_rank[rank][kind] * 1e3 for rank in ranks],
            "rank %{x}: %{y:.4g} ms of a step",
            COLOURS[kind],
        )
        for kind in KINDS
    ]
    means = [mean_kinds(stretch) for stretch in stretches]
    steps = [stretch[-1].step for stretch in stretches]
    over_time = [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "kinds",
            "name": kind,
            "x": steps,
            "y": [mean[kind] * 1e3 for mean in means],
            "line": {"width": 0.5, "color": COLOURS[kind]},
            "fillcolor": COLOURS[kind],
            "hovertemplate": "%{fullData.name}<br>up to step %{x:,}: %{y:.4g} ms of a step<extra></extra>",
        }
        for kind in KINDS
    ]
    is_gpu = any(window.device_seconds for times in run.ranks.values() for window in times.windows[-1:])
    host = (
        " On a GPU these are times of the host, which submits work and runs ahead of the device; the table below has"
        " the times of the device, and profiled steps show what it computes and exchanges."
        if is_gpu
        else ""
    )
    parts: list[Chart | Table] = [
        Chart(
            "Mean time of a step by rank",
            figure(per_rank, _rank_axis(ranks), axis("time of a step", "ms"), barmode="stack", bargap=_bar_gap(ranks)),
        )
    ]
    if len(stretches) > 1:
        layout = figure(over_time, axis("step"), axis("time of a step", "ms"))
        parts.append(Chart("Time of a step over the run, mean of all ranks", layout))
    parts.append(_share_table(windows))
    if is_gpu:
        parts.append(_device_table(run))
    return Section(
        "Where the time goes",
        "The time of a step by kind. Computing: forward pass, backward pass and optimizer. Exchanging: blocked in"
        " exchanges with other ranks that did not overlap with computing. Waiting for others: blocked although the"
        " exchange could not begin, because another rank was still computing. Waiting for data: the loader had no batch"
        f" ready. Evaluations and checkpoints are not part of a step.{host}",
        parts,
    )


def _rank_axis(ranks: Sequence[int]) -> dict[str, Any]:
    return axis("rank", dtick=1) if len(ranks) <= 16 else axis("rank")


def _bar_gap(ranks: Sequence[int]) -> float:
    """The gap between bars as a share of their distance: bars of few ranks are not wider than a page needs."""
    return max(0.15, 1 - 0.16 * len(ranks))


def _share_table(windows: Sequence[Sequence[StepKinds]]) -> Table:
    mean = mean_kinds(row for window in windows for row in window)
    total = sum(mean.values()) or 1.0
    rows: list[list[TableCell]] = [
        [kind, mean[kind] * 1e3, Cell(f"{mean[kind] / total:.1%}", mean[kind] / total)]
        for kind in sorted(KINDS, key=lambda kind: -mean[kind])
    ]
    rows.append(["whole step", total * 1e3, Cell("100%", 1.0)])
    return Table(["kind", "ms of a step", "share"], rows, "Mean of all ranks and steps")


def _device_table(run: RunRecord) -> Table:
    names = sorted({n for t in run.ranks.values() for w in t.windows for n in w.device_seconds})
    rows: list[list[TableCell]] = []
    for rank, times in sorted(run.ranks.items()):
        measured = [window.device_seconds for window in times.windows if window.device_seconds]
        means = [sum(seconds.get(name, 0.0) for seconds in measured) / max(1, len(measured)) * 1e3 for name in names]
        rows.append([rank, *means])
    return Table(["rank", *(f"{name}, ms" for name in names)], rows, "On the device: one step of every fifth window")


def _stragglers(
    run: RunRecord, windows: Sequence[Sequence[StepKinds]], stretches: Sequence[Sequence[StepKinds]]
) -> Section:
    speeds = rank_speeds(windows)
    slow = [speed for speed in speeds if speed.relative >= _SLOW]
    ranks = sorted(run.ranks)
    hosts = {
        rank: next((event.host for event in reversed(times.events) if event.kind == "start"), "")
        for rank, times in run.ranks.items()
    }
    if slow:
        worst = max(slow, key=lambda speed: speed.relative)
        names = ", ".join(str(speed.rank) for speed in slow[:10]) + (" …" if len(slow) > 10 else "")
        subject = f"Rank {names} computes" if len(slow) == 1 else f"Ranks {names} compute"
        verdict = (
            f"{subject} at least {_SLOW - 1:.0%} longer than the median rank; the slowest is rank {worst.rank}"
            f" ({worst.relative - 1:+.0%}). Look at its machine: other processes, clocks, memory."
        )
    else:
        verdict = f"No rank computes {_SLOW - 1:.0%} longer than the median rank."
    straggler = find_straggler([_seconds(run.ranks[rank]) for rank in ranks], _SLOW)
    if straggler is not None:
        verdict += f" With loading, {replace(straggler, rank=ranks[straggler.rank]).describe()}."
    rows: list[list[TableCell]] = [
        [
            speed.rank,
            hosts.get(speed.rank, ""),
            speed.computing_s * 1e3,
            Cell(f"{speed.relative - 1:+.1%}", speed.relative, "bad" if speed.relative >= _SLOW else ""),
            speed.waiting_s * 1e3,
            Cell(f"{speed.last_share:.0%}", speed.last_share),
        ]
        for speed in speeds
    ]
    header = ["rank", "host", "computing, ms of a step", "against the median", "waits for others, ms", "was last"]
    parts: list[Chart | Table] = [Table(header, rows)]
    if len(stretches) > 1:
        parts.insert(0, _heat_map(list(run.ranks), stretches))
    return Section(
        "Stragglers",
        f"{verdict} In synchronous training, all ranks wait for the slowest one. A rank that was last often made the"
        " others wait.",
        parts,
    )


def _seconds(times: RankTimes) -> dict[str, float]:
    """The seconds of a rank in all recorded steps, by activity."""
    totals: Counter[str] = Counter()
    for window in times.windows:
        totals.update(window.seconds)
    return dict(totals)


def _heat_map(ranks: Sequence[int], stretches: Sequence[Sequence[StepKinds]]) -> Chart:
    columns: list[dict[int, float]] = []
    for stretch in stretches:
        by_rank = {rank: mean[COMPUTING] for rank, mean in kinds_by_rank([stretch]).items()}
        typical = median(by_rank.values())
        columns.append({rank: (seconds / typical - 1) * 100 if typical else 0.0 for rank, seconds in by_rank.items()})
    z: list[list[Number]] = [[_round(column.get(rank)) for column in columns] for rank in ranks]
    largest = max((abs(value) for row in z for value in row if value is not None), default=0.0)
    limit = min(100.0, max(10.0, largest))
    trace = {
        "type": "heatmap",
        "x": [stretch[-1].step for stretch in stretches],
        "y": list(ranks),
        "z": z,
        "zmin": -limit,
        "zmax": limit,
        "zmid": 0,
        "colorscale": [[0, "var(--series-0)"], [0.5, "var(--ground)"], [1, "var(--series-5)"]],
        "colorbar": {"title": {"text": "%"}, "thickness": 12, "outlinewidth": 0},
        "hovertemplate": "rank %{y}, up to step %{x:,}: %{z:+.1f}% against the median rank<extra></extra>",
    }
    layout = figure([trace], axis("step"), _rank_axis(ranks))
    height = min(520, max(200, 110 + 14 * len(ranks)))
    return Chart("Computing time of each rank against the median rank", layout, height)


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _memory(run: RunRecord) -> Section:
    ranks = [rank for rank, times in run.ranks.items() if times.windows]
    peaks = [run.ranks[rank].windows[-1].peak_bytes for rank in ranks]
    traces = [bars("measured peak", ranks, [peak / _GIB for peak in peaks], "rank %{x}: %{y:.4g} GiB", colour(0))]
    predicted = (run.page.get("prediction") or {}).get("memory_bytes")
    is_cpu = run.device.startswith("cpu") or not run.device
    if isinstance(predicted, int | float) and not is_cpu:
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "predicted for the rank that needs most",
                "x": [ranks[0] - 0.5, ranks[-1] + 0.5],
                "y": [predicted / _GIB] * 2,
                "line": {"color": colour(5), "dash": "dash", "width": 2},
                "hovertemplate": "predicted: %{y:.4g} GiB<extra></extra>",
            }
        )
    largest = max(zip(peaks, ranks, strict=True))
    what = "resident memory of the process, with Python and libraries" if is_cpu else "memory allocated on the device"
    layout = figure(traces, _rank_axis(ranks), axis("peak memory", "GiB"), bargap=_bar_gap(ranks))
    return Section(
        "Memory",
        f"The peak of each rank: {what}. Rank {largest[1]} needs most, {bytes_text(largest[0])}.",
        [Chart("Peak memory by rank", layout, 260)],
    )
