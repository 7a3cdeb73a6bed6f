"""Prints the collectives benchmark as tables."""

from collections.abc import Sequence
from typing import Any

from rich.box import HORIZONTALS
from rich.console import Console
from rich.table import Table

from meshwright.numbers.units import bandwidth_text, bytes_text, number_text, seconds_text
from validation.bench.collectives.compare import CollectiveRow, summary
from validation.bench.collectives.rank import CollectiveMeasurements


def show(rows: Sequence[CollectiveRow], measured: CollectiveMeasurements, console: Console) -> None:
    ranks, rounds = sum(measured.nodes), len(next(iter(measured.times["native"].values())))
    node_words = f"{len(measured.nodes)} nodes of {measured.nodes[0]}" if len(measured.nodes) > 1 else "one node"
    stolen = f", {measured.stolen_cores:g} cores taken by the host" if measured.stolen_cores else ""
    table = Table(
        title=f"all-reduce of {ranks} ranks, {node_words}, {measured.cores} cores; medians of {rounds} rounds,"
        f" load {measured.load[0]:g} to {measured.load[1]:g}{stolen}",
        box=HORIZONTALS,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name in ("bytes", "algorithm", "time", "rounds", "bytes/s", "× native", "predicted", "error"):
        table.add_column(name, justify="left" if name == "algorithm" else "right", no_wrap=name != "algorithm")
    for index, row in enumerate(rows):
        is_last_of_size = index + 1 == len(rows) or rows[index + 1].bytes != row.bytes
        table.add_row(*_cells(row), end_section=is_last_of_size)
    console.print(table)
    for name, reason in measured.unavailable.items():
        console.print(f"{name} not run: {reason}", markup=False)
    for line in summary_lines(summary(rows, measured)):
        console.print(line, markup=False)
    if measured.training:
        _show_training(measured.training, console)


def _cells(row: CollectiveRow) -> list[str]:
    ratio = "" if row.ratio_to_native is None else f"{row.ratio_to_native:.3g}"
    predicted, error = "", ""
    if row.predicted_s is not None:
        predicted, error = seconds_text(row.predicted_s), f"{row.predicted_s / row.time_s - 1:+.0%}"
    name = row.algorithm.replace("_", " ")  # wraps between words
    speed = bandwidth_text(row.bandwidth_bytes_per_s)
    return [bytes_text(row.bytes), name, seconds_text(row.time_s), _range(*row.spread), speed, ratio, predicted, error]


def summary_lines(findings: dict[str, Any]) -> list[str]:
    """Returns the findings of `compare.summary` as lines of text."""
    lines = [f"auto is {findings['auto']}: {_regrets(findings['auto_regret'])}"]
    lines.append(f"the algorithm predicted to be the fastest is {_regrets(findings['chosen_regret'])}")
    for kind in ("measured", "predicted"):
        crossovers = [
            f"{change['to']} from {bytes_text(change['bytes'])} on" for change in findings[f"crossovers_{kind}"]
        ]
        first = next(iter((findings["fastest"] if kind == "measured" else findings["chosen"]).values()), "none")
        lines.append(f"fastest as {kind}: {', then '.join([first, *crossovers])}")
    wrong = [
        f"{pair['pair'][0]} before {pair['pair'][1]} at {bytes_text(pair['bytes'])}"
        for pair in findings["ranked_wrongly"]
    ]
    lines.append(
        f"ranked wrongly, of {findings['pairs_apart']} pairs whose rounds do not overlap: {', '.join(wrong) or 'none'}"
    )
    if findings["prediction_error_median"] is not None:
        by_name = ", ".join(f"{name} {error:.0%}" for name, error in findings["error_by_algorithm"].items())
        lines.append(
            f"prediction: median error {findings['prediction_error_median']:.0%}, worst"
            f" {findings['prediction_error_worst']:.0%} ({by_name})"
        )
    return lines


def _regrets(regrets: dict[int, float]) -> str:
    worst = max(regrets, key=lambda size_bytes: regrets[size_bytes], default=None)
    if worst is None:
        return "not measured"
    if not regrets[worst]:
        return "the fastest at every size"
    return f"at most {regrets[worst]:.0%} slower than the fastest ({bytes_text(worst)})"


def _show_training(training: dict[str, Any], console: Console) -> None:
    table = Table(
        title=f"{training['model']} in DDP, batch {training['batch']} per rank; medians of {training['rounds']} rounds"
    )
    for name in ("algorithm", "forward + backward", "spent on communication", "quartiles", "to native"):
        table.add_column(name, justify="left" if name == "algorithm" else "right")
    for row in training["rows"]:
        ratio = "" if row["ratio_to_native"] is None else f"{row['ratio_to_native']:.3g}"
        name, spread = row["algorithm"].replace("_", " "), _range(*row["spread_lost_s"])
        table.add_row(name, seconds_text(row["time_s"]), seconds_text(row["lost_s"]), spread, ratio)
    console.print(table)
    for session in training["sessions"]:
        console.print(
            f"Session, {session['algorithm']}: {session['samples_per_s']:,.0f} samples/s,"
            f" {session['of_no_exchange']:.1%} of the rate without communication",
            markup=False,
        )


def _range(low: float, high: float) -> str:
    """Two durations in the unit of the longer one, such as `0.83–1.39 ms`."""
    unit_s, unit = _unit(high)
    return f"{number_text(low / unit_s)}–{number_text(high / unit_s)} {unit}"


def _unit(value: float) -> tuple[float, str]:
    return (1.0, "s") if abs(value) >= 1 else (1e-3, "ms") if abs(value) >= 1e-3 else (1e-6, "µs")
