"""The section of a run's page with its loss, metrics and learning rate. Losses that are NaN or infinite are marked. If
the loss of a run that diverged grew by powers of ten, the axis is logarithmic, so that the steps before stay visible.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from meshwright.report.charts import BAD, Number, axis, colour, figure, line, shortened, thinned
from meshwright.report.page import Chart, Part, Section
from meshwright.report.run.record import RunRecord

NOT_FINITE = "NaN or infinite"
NOT_METRICS = ("kind", "step", "epoch", "time")
_DIVERGED = 1e3  # times the median loss
_MOST_MARKS = 200

Entry = Mapping[str, Any]


def loss_sections(run: RunRecord) -> Iterator[Section]:
    """Yields the section; none for a run that has logged nothing."""
    train, evaluations = run.entries("train"), run.entries("eval")
    parts: list[Part] = [_loss_chart(train, evaluations)] if train or evaluations else []
    for name in sorted({name for entry in evaluations for name in entry} - {"loss", *NOT_METRICS}):
        parts.append(_line_chart(name, evaluations, name, colour(2), 260))
    if len({entry.get("lr") for entry in train}) > 1:
        parts.append(_line_chart("learning rate", train, "lr", colour(6), 220))
    if parts:
        yield Section(
            "Loss and metrics",
            "The loss of every logged training step, and the metrics of every evaluation. In long runs, each stretch of"
            " steps is shown by its smallest and its largest value, so that every spike is visible.",
            parts,
        )


def _loss_chart(train: Sequence[Entry], evaluations: Sequence[Entry]) -> Chart:
    traces = [
        _line("training", train, "loss", colour(0)),
        _line("evaluation", evaluations, "loss", colour(5)),
    ]
    traces = [trace for trace in traces if trace["x"]]
    losses = [loss for entry in (*train, *evaluations) if (loss := entry.get("loss")) is not None]
    has_diverged = bool(losses) and min(losses) > 0 and max(losses) > _DIVERGED * median(losses)
    scale = {"type": "log", "exponentformat": "power", "nticks": 8} if has_diverged else {}
    missing = [entry["step"] for entry in train if "loss" in entry and entry["loss"] is None]
    note = "The axis of the loss is logarithmic." if has_diverged else ""
    if missing:
        traces.append(_not_finite(missing, max(losses, default=1.0)))
        note += f" The loss of {len(missing):,} logged steps is {NOT_FINITE}, the first of them step {missing[0]:,}."
    return Chart(
        "Loss", figure(traces, _step_axis(), axis("loss", "mean over samples", **scale)), note=note.removeprefix(" ")
    )


def _not_finite(steps: Sequence[int], height: float) -> dict[str, Any]:
    shown, _ = thinned(steps, [height] * len(steps), _MOST_MARKS)
    return {
        "type": "scatter",
        "mode": "markers",
        "name": NOT_FINITE,
        "x": shown,
        "y": [height] * len(shown),
        "hovertemplate": f"step %{{x:,}}: {NOT_FINITE}<extra></extra>",
        "marker": {"symbol": "x", "size": 8, "color": BAD},
    }


def _line_chart(title: str, entries: Sequence[Entry], key: str, line_colour: str, height_px: int) -> Chart:
    return Chart(
        title[0].upper() + title[1:] if key == "lr" else title,
        figure([_line(title, entries, key, line_colour)], _step_axis(), axis(shortened(title))),
        height_px,
    )


def _line(name: str, entries: Sequence[Entry], key: str, line_colour: str) -> dict[str, Any]:
    steps: list[int] = [entry["step"] for entry in entries]
    values: list[Number] = [entry.get(key) for entry in entries]
    return line(name, steps, values, "step %{x:,}: %{y:.5g}", line_colour)


def _step_axis() -> dict[str, Any]:
    return axis("step", rangemode="tozero")
