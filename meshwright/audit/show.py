"""Prints an audit for people."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.audit.result import Audit


def show(audit: Audit, console: Console) -> None:
    console.print(_headline(audit))
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, text in _rows(audit):
        table.add_row(name, Text(text))  # Text: names of parameters are not markup
    console.print(table)


def _headline(audit: Audit) -> Text:
    if not audit.comparable:
        return Text("Not comparable: the two commands did not train on the same samples", "bold yellow")
    steps = "1 step" if audit.steps == 1 else f"{audit.steps} steps"
    ranks = "1 rank" if audit.ranks[1] == 1 else f"{audit.ranks[1]} ranks"
    if audit.equal:
        return Text(f"Equal: the candidate on {ranks} trains as the reference does, {steps} compared", "green")
    first = audit.first_difference
    if first is None:
        return Text("Not equal: some parameters could not be compared", "bold red")
    value = f"{first.what} of {first.name}" if first.name else f"gradient {first.what}"
    when = f"after step {first.step}" if first.what in ("weight", "buffer") else f"in step {first.step}"
    when = "before the first step" if first.step == 0 else when
    places = _places("row", first.rows) + _places("rank", first.ranks if audit.ranks[1] > 1 else ())
    return Text(f"Not equal: the {value}{places} {when} is {first.error:.2e} off", "bold red")


def _places(word: str, numbers: tuple[int, ...], most: int = 6) -> str:
    if not numbers:
        return ""
    listed = ", ".join(map(str, numbers[:most])) + (", …" if len(numbers) > most else "")
    return f" on {word}{'s' if len(numbers) > 1 else ''} {listed}"


def _rows(audit: Audit) -> list[tuple[str, str]]:
    checked = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in audit.checked.items() if count)
    rows = [
        ("compared", checked),
        ("computed in", ", ".join(audit.dtypes)),
        ("largest relative error of a gradient", f"{audit.max_relative_error:.2e}"),
    ]
    if audit.samples:
        rows.append(("samples", audit.samples))
    if audit.explained:
        cause = audit.explained.cause.replace("_", " ")
        rows.append(("cause", f"{cause}: {audit.explained.explanation}"))
    if audit.comparable and len(audit.differences) > 1:
        first = audit.differences[0]
        same = [item.name for item in audit.differences[1:] if item.what == first.what and item.name]
        rows.append(("also differ", _list(same) if same else f"{len(audit.differences) - 1} later values"))
    for title, names in (
        ("only in the reference", audit.only_reference),
        ("only in the candidate", audit.only_candidate),
        ("recorded only in part", audit.not_compared),
    ):
        if names:
            rows.append((title, _list(list(names))))
    rows.append(("layouts", ", ".join(audit.layouts)))
    rows += [("note" if number == 0 else "", note) for number, note in enumerate(audit.notes)]
    return rows


def _list(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
