"""The table of the strategies benchmark, and the derived figures below it."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from meshwright.bench.strategies.rows import StrategyReport, StrategyRow
from meshwright.numbers.units import bytes_text, number_text, seconds_text
from meshwright.progress import describe_seconds

_WIDE = 96  # columns of a terminal in which all columns of the table fit
_SHARES = ("computing", "communicating", "waiting", "bubble")


def show(report: StrategyReport, console: Console) -> None:
    """Prints one table for the speed and one for what the time and the memory are spent on, the derived figures, and
    the strategies that were not run."""
    console.print(_title(report), markup=False, highlight=False)
    console.print()
    console.print(_speed_table(report, console.width) if report.is_measured else _predicted_table(report))
    if report.is_measured:
        console.print()
        console.print(_cost_table(report))
    console.print()
    for line in _figure_lines(report):
        console.print(line, markup=False, highlight=False)
    if report.skipped:
        console.print()
        table = _table("not run", "ranks", "because")
        for (ranks, reason), names in _skipped_by_reason(report).items():
            table.add_row(", ".join(names), str(ranks), reason)
        console.print(table)


def _skipped_by_reason(report: StrategyReport) -> dict[tuple[int, str], list[str]]:
    """The names of the strategies that were not run, each once, by the number of ranks and the reason."""
    names: dict[tuple[int, str], list[str]] = {}
    for skipped in report.skipped:
        with_same_reason = names.setdefault((skipped.ranks, skipped.reason), [])
        if skipped.strategy not in with_same_reason:
            with_same_reason.append(skipped.strategy)
    return names


def _title(report: StrategyReport) -> str:
    if not report.is_measured:
        return f"{report.job}: {report.global_batch:,} samples a step on {report.cluster}, predicted"
    rounds = max(row.rounds for row in report.rows)
    precision = "" if _has_precisions(report) else f" in {report.rows[0].precision}"
    return (
        f"{report.job}: {report.global_batch:,} samples a step{precision}, {report.steps} timed"
        f" {'step' if report.steps == 1 else 'steps'}, {rounds}"
        f" {'round' if rounds == 1 else 'rounds'} in {describe_seconds(report.seconds)}"
    )


def _table(*columns: str) -> Table:
    """Returns an empty table. Where it is too wide, the first column and the last one of words wrap."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for number, column in enumerate(columns):
        is_text = number == 0 or column == "because"
        table.add_column(column, justify="left" if is_text else "right", no_wrap=not is_text)
    return table


def _names(report: StrategyReport, row: StrategyRow) -> tuple[str, ...]:
    """The cells that name a row. The precision has a column if there are several."""
    name = row.strategy.replace("_", " ")
    return (name, str(row.ranks), row.precision) if _has_precisions(report) else (name, str(row.ranks))


def _name_columns(report: StrategyReport) -> tuple[str, ...]:
    return ("strategy", "ranks", "precision") if _has_precisions(report) else ("strategy", "ranks")


def _has_precisions(report: StrategyReport) -> bool:
    return len({row.precision for row in report.rows}) > 1


def _speed_table(report: StrategyReport, width: int) -> Table:
    is_wide = width >= _WIDE
    columns = ("samples/s", "±", "speed-up", "efficiency", *(("step",) if is_wide else ()), "predicted", "loss")
    table = _table(*_name_columns(report), *columns)
    for row in report.rows:
        table.add_row(
            *_names(report, row),
            number_text(row.samples_per_s),
            _percent(None if row.spread is None else row.spread / 2),
            _ratio(row.speedup),
            _percent(row.efficiency),
            *((seconds_text(row.measured_step_s),) if is_wide else ()),
            seconds_text(row.predicted_step_s),
            _loss(row),
        )
    return table


def _predicted_table(report: StrategyReport) -> Table:
    table = _table(*_name_columns(report), "samples/s", "speed-up", "efficiency", "step", "memory")
    for row in report.rows:
        rate = None if row.predicted_step_s is None else report.global_batch / row.predicted_step_s
        efficiency = None if row.predicted_speedup is None else row.predicted_speedup / row.ranks
        table.add_row(
            *_names(report, row),
            number_text(rate),
            _ratio(row.predicted_speedup),
            _percent(efficiency),
            seconds_text(row.predicted_step_s),
            bytes_text(row.predicted_memory_bytes) + ("*" if row.note else ""),
        )
    return table


def _cost_table(report: StrategyReport) -> Table:
    table = _table(*_name_columns(report), *_SHARES, "exchanged", "memory")
    for row in report.rows:
        shares = row.shares or {}
        table.add_row(
            *_names(report, row),
            *(_percent(shares.get(name)) for name in _SHARES),
            bytes_text(row.exchanged_bytes),
            bytes_text(row.peak_memory_bytes),
        )
    return table


def _figure_lines(report: StrategyReport) -> Iterator[str]:
    summary = report.summary()
    kind = "measured" if report.is_measured else "predicted"
    if fastest := summary["fastest"]:
        where = f"{_ranks(fastest['ranks'])} in {fastest['precision']}"
        rate = report.global_batch / fastest["step_s"]
        yield f"The fastest, {kind}: {fastest['strategy']} on {where}, {number_text(rate)} samples/s."
    for ranks, ratio in summary["automatic_over_manual"].items():
        yield (
            f"Automatic over manual on {_ranks(ranks)}: the plan of `auto` is {ratio:.2f} times as fast as the fastest"
            " strategy that was chosen by hand."
        )
    for precision, gain in summary["mixed_precision_gain"].items():
        yield f"Mixed-precision gain: {precision} is {gain:.2f} times as fast as fp32 (median over the strategies)."
    if summary["prediction_error_median"] is not None and report.is_measured:
        yield f"Predicted step times are {summary['prediction_error_median']:.0%} off (median)."
    for row in report.rows if not report.is_measured else ():
        if row.note is not None:
            yield f"* {row.strategy} on {_ranks(row.ranks)} does not fit: it {row.note}."
    for row in report.rows:
        if row.loss_agrees is False:
            reason = row.note or f"more than the {row.loss_tolerance:.2%} that its numerics explain"
            yield f"* The loss of {row.strategy} on {row.ranks} ranks differs by {row.loss_difference:.1%}: {reason}."
    if report.is_measured:
        yield "Speed-up: compared with one device. Efficiency: speed-up / ranks. ±: half of the spread over the rounds."
        yield "Exchanged: sent by all ranks in a step. Memory: of the largest process, on CPUs with its libraries."


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _loss(row: StrategyRow) -> str:
    if row.loss is None:
        return "–"
    return f"{row.loss:.4f}" + ("" if row.loss_agrees is not False else "*")


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
