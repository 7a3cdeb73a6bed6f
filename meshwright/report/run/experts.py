"""The section of a run's page on the loads of experts: how evenly routers use them, and which rank others wait for."""

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.parallel.expert.loads import SKEWED, rank_loads, relative_loads, skew_warning
from meshwright.report.charts import axis, colour, figure, line
from meshwright.report.page import Cell, Chart, Section, Table
from meshwright.report.run.record import RunRecord


def expert_sections(run: RunRecord) -> Iterator[Section]:
    """Yields the section; none for a run whose experts are not divided over ranks."""
    ranks = run.plan.axes.expert if run.plan is not None else 1
    tokens = _tokens((run.result or {}).get("expert_tokens"), ranks)
    entries = [entry for entry in run.entries("train") if isinstance(entry.get("expert_load"), int | float)]
    parts: list[Chart | Table] = []
    if entries:
        parts.append(_over_time(entries, ranks))
    if tokens:
        parts.append(_by_layer(tokens, ranks))
        parts.append(_by_expert(tokens))
    if not parts:
        return
    warning = skew_warning(tokens, ranks) if tokens else None
    yield Section(
        "Experts",
        "How many times its even share of tokens each expert got: 1 everywhere if routing is even. The ranks of the"
        " expert axis wait for the one whose experts get most."
        + (f" {warning[0].upper()}{warning[1:]}." if warning else ""),
        parts,
    )


def _tokens(value: Any, ranks: int) -> dict[str, list[int]]:
    """The tokens of each expert by layer, as result.json has them; without entries that are not in this form."""
    if not isinstance(value, Mapping):
        return {}
    return {
        str(layer): counts
        for layer, counts in value.items()
        if isinstance(counts, list)
        and counts
        and len(counts) % ranks == 0
        and all(type(count) is int and count >= 0 for count in counts)
    }


def _over_time(entries: list[Any], ranks: int) -> Chart:
    steps = [entry["step"] for entry in entries]
    names = (("expert_load", "most used expert of a layer"), ("expert_rank_load", f"busiest of {ranks} ranks"))
    traces = [
        line(name, steps, [entry.get(key, 0.0) for entry in entries], "step %{x:,}: %{y:.3g} times", colour(number))
        for number, (key, name) in enumerate(names)
    ]
    return Chart("Loads over time", figure(traces, axis("step"), axis("times the even share", rangemode="tozero")))


def _by_layer(tokens: Mapping[str, list[int]], ranks: int) -> Table:
    rows: list[list[Any]] = []
    for layer, counts in tokens.items():
        loads, of_ranks = relative_loads(counts), rank_loads(counts, ranks)
        largest, busiest = max(loads), max(of_ranks)
        rows.append(
            [
                layer,
                loads.index(largest),
                Cell(f"{largest:.2f}", largest, "bad" if largest > SKEWED else ""),
                sum(count == 0 for count in counts),
                of_ranks.index(busiest),
                Cell(f"{busiest:.2f}", busiest),
            ]
        )
    header = [
        "layer",
        "most used expert",
        "its load",
        "experts without a token",
        "busiest rank of the axis",
        "its load",
    ]
    return Table(header, rows, "Loads by layer")


def _by_expert(tokens: Mapping[str, list[int]]) -> Chart:
    layers = list(tokens)
    trace = {
        "type": "heatmap",
        "x": list(range(max(map(len, tokens.values())))),
        "y": layers,
        "z": [relative_loads(tokens[layer]) for layer in layers],
        "zmin": 0,
        "colorbar": {"title": {"text": "times the even share"}},
        "hovertemplate": "%{y}, expert %{x}: %{z:.3g} times its even share<extra></extra>",
    }
    return Chart("Loads by expert", figure([trace], axis("expert"), axis("layer", automargin=True, type="category")))
