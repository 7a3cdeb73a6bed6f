"""The page of an audit: the first difference, the modules coloured by how much their gradients differ, and every
comparison."""

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.report.charts import BAD, MUTED, SERIES_COLOURS
from meshwright.report.page import Cell, KeyFigures, Page, Part, Phrase, Section, Table, Tree, TreeNode

_MOST_ROWS = 20_000
_OPEN_DEPTH = 3
_NEAR = 0.5  # of what rounding explains

Row = dict[str, Any]


def audit_page(details: Mapping[str, Any]) -> Page:
    """Returns the page of an audit. `details` is the JSON that `meshwright audit --output` saves; without `compared`,
    as in the JSON that it prints, the page has the summary only."""
    rows = _rows(details)
    sections = [
        Section("Result", _result_words(details), [_key_figures(details), *_facts(details)]),
        Section("The first difference", _difference_words(details), list(_cause_tables(details))),
        Section("Gradients by module", _tree_words(), [_tree(rows)] if rows else []),
        Section("Every comparison", _table_words(), [_table(rows)] if rows else []),
    ]
    subtitle = f"{details['candidate']} compared with {details['reference']}"
    return Page("Audit", subtitle, [section for section in sections if section.parts], _badge(details))


def _badge(details: Mapping[str, Any]) -> str:
    if not details["comparable"]:
        return "not comparable"
    return "equal" if details["equal"] else "not equal"


def _rows(details: Mapping[str, Any]) -> list[Row]:
    compared = details.get("compared") or {"columns": [], "rows": []}
    return [dict(zip(compared["columns"], row, strict=True)) for row in compared["rows"]]


def _result_words(details: Mapping[str, Any]) -> str:
    ranks = details["ranks"]
    words = (
        f"Both commands were recorded from outside for {details['steps']} optimizer steps, the reference on"
        f" {ranks['reference']} and the candidate on {ranks['candidate']} ranks, from the same weights."
    )
    if not details["comparable"]:
        return f"{words} They did not see the same samples: {details['samples']}."
    if details["equal"]:
        return f"{words} No value differs by more than rounding explains."
    return f"{words} They differ by more than rounding explains."


def _key_figures(details: Mapping[str, Any]) -> KeyFigures:
    rows = [("largest relative error of a gradient", _number(details["max_relative_error"]))]
    rows += [(f"{name.replace('_', ' ')} compared", f"{count:,}") for name, count in details["checked"].items()]
    return KeyFigures(rows)


def _facts(details: Mapping[str, Any]) -> Iterator[Part]:
    rows = [
        ("reference", details["reference"]),
        ("candidate", details["candidate"]),
        ("start", f"{details['start']} weights"),
        ("computed in", ", ".join(details["dtypes"])),
        ("layouts", ", ".join(details["layouts"])),
    ]
    for title, field in (
        ("only in the reference", "only_reference"),
        ("only in the candidate", "only_candidate"),
        ("recorded only in part", "not_compared"),
    ):
        if details[field]:
            rows.append((title, ", ".join(details[field])))
    rows += [("note", note) for note in details["notes"]]
    yield Table(("", "about this audit"), rows)


def _difference_words(details: Mapping[str, Any]) -> str:
    first = details["first_difference"]
    if not first:
        return ""
    of = f" of {first['parameter']}" if first["parameter"] else ""
    when = f"in step {first['step']}" if first["step"] else "before the first step"
    cause = (first["cause"] or "unknown").replace("_", " ")
    why = f" {first['explanation'][0].upper()}{first['explanation'][1:]}." if first.get("explanation") else ""
    places = "".join(
        f" {word} {', '.join(map(str, first[word]))}." for word in ("ranks", "rows") if first[word]
    ).replace(" r", " R")
    size = f"{_number(first['error'])} off, where rounding explains {_number(first['allowed'])}"
    return f"The {first['what']}{of} {when} is {size}.{places} Cause: {cause}.{why}"


def _cause_tables(details: Mapping[str, Any]) -> Iterator[Part]:
    first = details["first_difference"]
    if not first:
        return
    named = (first["cause"] or "unknown").replace("_", " ")
    rows = [(named, Cell("the cause", tone="bad"), first["explanation"] or "")]
    rows += [(cause.replace("_", " "), Cell("ruled out", tone="muted"), "") for cause in first["ruled_out"]]
    yield Table(("cause", "verdict", "evidence"), rows, "What could cause it")


def _tree_words() -> str:
    return (
        "Each parameter with the largest error of its gradient in any step, relative to the largest difference that"
        " rounding explains there. Above 1 it differs; a module has the largest figure of what is inside."
    )


def _tree(rows: list[Row]) -> Tree:
    largest: dict[str, float] = {}
    for row in rows:
        if row["what"] == "gradient" and row["parameter"]:
            ratio = float("inf") if row["of_allowed"] is None else row["of_allowed"]
            largest[row["parameter"]] = max(largest.get(row["parameter"], 0.0), ratio)
    root: dict[str, Any] = {}
    for name, ratio in largest.items():
        place = root
        for part in name.split("."):
            place = place.setdefault(part, {})
        place[""] = ratio
    description = "The modules of the model, with the largest error of their gradients."
    return Tree(_node("model", root, 0)[0], description, "Where gradients differ")


def _node(name: str, inside: Mapping[str, Any], depth: int) -> tuple[TreeNode, float]:
    below = [_node(child, value, depth + 1) for child, value in inside.items() if child]
    worst = max([inside.get("", 0.0), *(ratio for _, ratio in below)])
    colour = BAD if worst > 1 else (SERIES_COLOURS[1] if worst > _NEAR else MUTED)
    label = f"{_times(worst)} of what rounding explains"
    phrases = [Phrase(name, "name"), Phrase(label, "label", colour)]
    return TreeNode(phrases, [node for node, _ in below], depth < _OPEN_DEPTH or worst > 1), worst


def _times(ratio: float) -> str:
    if ratio > 1e6:
        return "more than a million times"
    return f"{ratio:,.3g} times"


def _table_words() -> str:
    return "Every gradient, norm, buffer and weight that was compared; only the first step that differs is compared on."


def _table(rows: list[Row]) -> Table:
    listed = [
        (
            row["step"],
            row["what"],
            row["parameter"] or "",
            Cell(_number(row["error"]), row["error"]),
            Cell(_number(row["of_allowed"]), row["of_allowed"], "" if _is_equal(row) else "bad"),
        )
        for row in rows[:_MOST_ROWS]
    ]
    header = ("step", "value", "parameter", "relative error", "relative to what rounding explains")
    return Table(header, listed)


def _is_equal(row: Row) -> bool:
    return row["of_allowed"] is not None and row["of_allowed"] <= 1


def _number(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.2e}"
