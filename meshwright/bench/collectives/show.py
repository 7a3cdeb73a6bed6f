"""The collectives benchmark as tables for people."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from meshwright.bench.collectives.compare import Row, summary
from meshwright.bench.collectives.rank import Found


def show(rows: Sequence[Row], found: Found, console: Console) -> None:
    ranks, rounds = sum(found.nodes), len(next(iter(found.times["native"].values())))
    where = f"{len(found.nodes)} nodes of {found.nodes[0]}" if len(found.nodes) > 1 else "one node"
    table = Table(
        title=f"all-reduce of {ranks} ranks, {where}, {found.cores} cores; medians of {rounds} rounds,"
        f" load {found.load[0]:g} to {found.load[1]:g}{f', {found.stolen:g} cores taken away' if found.stolen else ''}"
    )
    for name in ("bytes", "algorithm", "time", "its rounds", "bytes/s", "to native", "predicted", "error"):
        table.add_column(name, justify="left" if name == "algorithm" else "right")
    for place, row in enumerate(rows):
        last = place + 1 == len(rows) or rows[place + 1].bytes != row.bytes
        table.add_row(*_cells(row, found), end_section=last)
    console.print(table)
    for name, reason in found.refused.items():
        console.print(f"{name} not run: {reason}", markup=False)
    for line in lines(summary(rows, found)):
        console.print(line, markup=False)
    if found.training:
        _show_training(found.training, console)


def _cells(row: Row, found: Found) -> list[str]:
    name = f"auto ({found.picked})" if row.algorithm == "auto" else row.algorithm
    ratio = "" if row.ratio_to_native is None else f"{row.ratio_to_native:.3g}"
    predicted, error = "", ""
    if row.predicted_s is not None:
        predicted, error = seconds(row.predicted_s), f"{row.predicted_s / row.time_s - 1:+.0%}"
    spread = f"{seconds(row.spread[0])} to {seconds(row.spread[1])}"
    speed = f"{row.bandwidth_bytes_per_s / 1e9:.3g} GB/s"
    return [size(row.bytes), name, seconds(row.time_s), spread, speed, ratio, predicted, error]


def lines(found: dict[str, Any]) -> list[str]:
    """The summary, a line for each of its findings."""
    told = [f"auto is {found['auto']}: {_regrets(found['auto_regret'])}"]
    told.append(f"what the wires would choose: {_regrets(found['chosen_regret'])}")
    for kind in ("measured", "predicted"):
        changes = [f"{one['to']} from {size(one['bytes'])} on" for one in found[f"crossovers_{kind}"]]
        first = next(iter((found["fastest"] if kind == "measured" else found["chosen"]).values()), "none")
        told.append(f"fastest as {kind}: {', then '.join([first, *changes])}")
    wrong = [f"{one['pair'][0]} before {one['pair'][1]} at {size(one['bytes'])}" for one in found["ranked_wrongly"]]
    told.append(
        f"ranked wrongly, of {found['pairs_apart']} pairs whose rounds do not overlap: {', '.join(wrong) or 'none'}"
    )
    if found["prediction_error_median"] is not None:
        by_name = ", ".join(f"{name} {error:.0%}" for name, error in found["error_by_algorithm"].items())
        told.append(
            f"prediction: median error {found['prediction_error_median']:.0%}, worst"
            f" {found['prediction_error_worst']:.0%} ({by_name})"
        )
    return told


def _regrets(found: dict[int, float]) -> str:
    worst = max(found, key=lambda place: found[place], default=None)
    if worst is None:
        return "not measured"
    if not found[worst]:
        return "the fastest at every size"
    return f"at most {found[worst]:.0%} slower than the fastest ({size(worst)})"


def _show_training(found: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{found['model']}, batch {found['batch']} a rank, in DDP; medians of {found['rounds']} rounds")
    for name in ("algorithm", "forward + backward", "lost to the exchange", "its quartiles", "to native"):
        table.add_column(name, justify="left" if name == "algorithm" else "right")
    for row in found["rows"]:
        ratio = "" if row["ratio_to_native"] is None else f"{row['ratio_to_native']:.3g}"
        spread = f"{seconds(row['spread_lost_s'][0])} to {seconds(row['spread_lost_s'][1])}"
        table.add_row(row["algorithm"], seconds(row["time_s"]), seconds(row["lost_s"]), spread, ratio)
    console.print(table)
    for one in found["sessions"]:
        console.print(
            f"Session, {one['algorithm']}: {one['samples_per_s']:,.0f} samples/s,"
            f" {one['of_no_exchange']:.1%} of those without any exchange",
            markup=False,
        )


def seconds(found: float) -> str:
    if abs(found) >= 0.1:
        return f"{found:.2f} s"
    return f"{found * 1e3:.2f} ms" if abs(found) >= 1e-3 else f"{found * 1e6:.1f} µs"


def size(count: int) -> str:
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if count >= unit and count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count} B"
