"""The page of a plan: of what `meshwright plan` has found, or of a plan file alone."""

import json
from collections.abc import Mapping
from typing import Any

from meshwright.numbers.units import bytes_text, number_text, seconds_text
from meshwright.plan import Plan
from meshwright.report.cluster_drawing import cluster_drawing
from meshwright.report.model_tree import model_tree
from meshwright.report.page import Cell, KeyFigures, Lines, Page, Part, Section, Table
from meshwright.report.plans.candidates import cloud_chart
from meshwright.report.plans.memory import memory_parts
from meshwright.report.plans.scaling import scaling_chart
from meshwright.report.plans.step import TERMS, breakdown_chart, exchange_parts, timeline_chart

_NUMERICS = {"same": "no", "rounding": "last bits", "changes": "yes"}


def plan_page(details: Mapping[str, Any]) -> Page:
    """Returns the page of a plan. `details` is what `plan_details` returned, or the JSON that `meshwright plan --json`
    printed, which has fewer sections."""
    best = details["best"]
    title = f"Plan of {details['title']}" if details.get("title") else "Plan"
    cluster = details.get("cluster")
    where = f" on {cluster['name']}" if cluster else ""
    is_search = details["candidates"] > 1
    others = ", for the best plan and for those after it" if is_search else ""
    candidates = [cloud_chart(details), *_plan_tables(details)] if is_search else []
    sections = [
        Section("The best plan" if is_search else "The plan", _first_lines(details), _summary(details)),
        Section("Time", f"What the predicted step consists of{others}.", _time(details)),
        Section("Candidates", _cloud_words(details), _parts(candidates)),
        Section("Memory", "What is in the memory of a device during one step.", memory_parts(details)),
        Section("Exchanges", "What ranks send each other in a step.", exchange_parts(details)),
        Section("Model", "What the plan does to each module.", _modules(details)),
        Section("Cluster", "Machines, devices and links.", [cluster_drawing(cluster)] if cluster else []),
        Section("Scaling", "Whether more devices help.", _parts([scaling_chart(details)])),
        Section("What the predictions are based on", _basis(details), _constants(details)),
        Section("The plan file", "Use it with train --plan FILE, or prove --plan FILE.", [_plan_lines(best["plan"])]),
    ]
    return Page(title, f"{best['summary']}{where}", [section for section in sections if section.parts])


def plan_file_page(plan: Plan, name: str) -> Page:
    """Returns the page of a plan without a job: there is nothing to predict, so only its choices are shown."""
    rows: list[tuple[str, str, str, str, str]] = []
    for group_name, group in plan:
        for field_name, field in type(group).model_fields.items():
            value = getattr(group, field_name)
            extra = field.json_schema_extra
            effect = str(extra.get("numerics", "")) if isinstance(extra, dict) else ""
            chosen = "default" if value == field.default else "plan"
            rows.append((group_name, field_name, _field_text(value), chosen, _NUMERICS.get(effect, effect)))
    rows.sort(key=lambda row: row[3] == "default")
    figures = KeyFigures([("ranks", f"{plan.world_size:,}"), ("processes", f"{plan.processes:,}"), *_axes(plan)])
    header = ("group", "field", "value", "set by", "changes the result")
    sections = [
        Section("The plan", "Its choices, those that differ from the defaults first.", [figures, Table(header, rows)]),
        Section("The plan file", "Use it with train --plan FILE.", [_plan_lines(plan.model_dump(mode="json"))]),
    ]
    words = "A plan alone has no predictions: meshwright plan JOB --plan FILE --html PAGE predicts it for a job."
    return Page(f"Plan {name}", f"{plan.summary()}. {words}", sections)


def _field_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_field_text(item)}" for key, item in value.items()) or "none"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    if hasattr(value, "kind"):
        return f"{value.kind} over {value.axis}"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _axes(plan: Plan) -> list[tuple[str, str]]:
    return [(name, f"{size:,}") for name, size in plan.axes.model_dump().items() if size > 1]


def _parts(parts: list[Any]) -> list[Part]:
    return [part for part in parts if part is not None]


def _choice(details: Mapping[str, Any]) -> str:
    choice = details.get("choice") or ""
    return f"{choice[0].upper()}{choice[1:]}." if choice else "This plan was given, not searched for."


def _first_lines(details: Mapping[str, Any]) -> str:
    """The figures of the plan, and how it was chosen. JSON of earlier versions has no figures."""
    line = details.get("headline") or ""
    return f"{line}. {_choice(details)}" if line else _choice(details)


def _summary(details: Mapping[str, Any]) -> list[Part]:
    best, batch = details["best"], details.get("global_batch")
    device_bytes = (details.get("device_bytes") or [best["memory_bytes"]])[0]
    rows = [("predicted step", seconds_text(best["step_s"]))]
    if batch:
        rows.append(("samples per second", number_text(batch / best["step_s"])))
        rows.append(("global batch", f"{batch:,} samples"))
    rows.append(("memory of a device", bytes_text(device_bytes)))
    if details.get("capacity_bytes"):
        rows.append(("of what a plan may use", f"{device_bytes / details['capacity_bytes']:.0%}"))
    ranks = Plan.model_validate(best["plan"]).world_size
    rows += [("ranks", f"{ranks:,}"), ("candidates", f"{details['candidates']:,}")]
    if details.get("seconds"):
        rows.append(("planning took", seconds_text(details["seconds"])))
    sentences = details.get("sentences") or [details["explanation"]]
    return [KeyFigures(rows), Table(("Why this plan",), [(sentence,) for sentence in sentences if sentence])]


def _time(details: Mapping[str, Any]) -> list[Part]:
    best = details["best"]
    rows = [
        (TERMS.get(name, (name,))[0], Cell(seconds_text(value), value), Cell(f"{value / best['step_s']:.1%}", value))
        for name, value in sorted(best["breakdown"].items(), key=lambda term: -term[1])
        if value
    ]
    rows.append(("the whole step", Cell(seconds_text(best["step_s"]), best["step_s"]), Cell("100%", best["step_s"])))
    table = Table(("part of the plan's step", "time", "share"), rows)
    return _parts([breakdown_chart(details), table, timeline_chart(details)])


def _cloud_words(details: Mapping[str, Any]) -> str:
    candidates = details["candidates"]
    if candidates <= 1:
        return "This plan alone was predicted."
    return (
        f"{candidates:,} plans were considered. Points further left are faster, points further down need less memory."
    )


def _plan_tables(details: Mapping[str, Any]) -> list[Part]:
    batch, ranked = details.get("global_batch"), details["ranked"]
    needed = details.get("device_bytes") or [entry["memory_bytes"] for entry in ranked]
    rows = [
        (
            number + 1,
            entry["summary"],
            Cell(seconds_text(entry["step_s"]), entry["step_s"]),
            Cell(number_text(batch / entry["step_s"]), batch / entry["step_s"]) if batch else None,
            Cell(bytes_text(size), size),
            Cell(f"{entry['step_s'] / ranked[0]['step_s'] - 1:+.1%}", entry["step_s"]),
        )
        for number, (entry, size) in enumerate(zip(ranked, needed, strict=True))
    ]
    rows += [_plain_row(entry, batch, ranked[0]["step_s"]) for entry in _plain_entries(details)]
    header = ("", "plan", "step", "samples/s", "memory of a device", "against the best")
    tables: list[Part] = [Table(header, rows, "Ranked plans, and plain ones")]
    rejected = details.get("rejected_plans")
    if rejected is None:
        plans = [(Plan.model_validate(entry["plan"]).summary(), entry["reason"]) for entry in details["rejected"]]
    else:
        plans = [(entry["summary"], entry["reason"]) for entry in rejected]
    if plans:
        tables.append(Table(("plan", "why it was rejected"), plans, "Rejected plans, the best of each kind"))
    return tables


def _plain_entries(details: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The plain plans that are not ranked. JSON of earlier versions has none."""
    ranked = [entry["plan"] for entry in details["ranked"]]
    return [entry for entry in details.get("plain", ()) if "plan" in entry and entry["plan"] not in ranked]


def _plain_row(entry: Mapping[str, Any], batch: int | None, best_s: float) -> tuple[Any, ...]:
    step_s, size = entry["step_s"], entry["device_bytes"]
    return (
        "",
        f"{entry['name']}: {entry['summary']}",
        Cell(seconds_text(step_s), step_s),
        Cell(number_text(batch / step_s), batch / step_s) if batch else None,
        Cell(bytes_text(size), size),
        Cell(f"{step_s / best_s - 1:+.1%}", step_s),
    )


def _modules(details: Mapping[str, Any]) -> list[Part]:
    tree = details.get("modules")
    return [model_tree(tree)] if tree else []


def _basis(details: Mapping[str, Any]) -> str:
    method = f" Operators and tensors of a step: {details['method']}." if details.get("method") else ""
    return f"Constants of the hardware: {details['best']['based_on']}.{method}"


def _constants(details: Mapping[str, Any]) -> list[Part]:
    rows = [
        (owner, name, value, source or "not stated") for owner, name, value, source in details.get("constants") or []
    ]
    if not rows:
        return [KeyFigures([("hardware", details["best"]["based_on"])])]
    return [Table(("of", "constant", "value", "source"), rows)]


def _plan_lines(plan: Mapping[str, Any]) -> Lines:
    return Lines(Plan.model_validate(plan).to_yaml().splitlines())
