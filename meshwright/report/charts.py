"""Builds the figures of charts: line charts, stacked bars, heat maps and their axes, as plain dicts for plotly. A chart
has at most a few thousand points: `thinned` keeps the smallest and the largest value of each stretch of a long series.
"""

from collections.abc import Mapping, Sequence
from typing import Any

SERIES_COLOURS = tuple(f"var(--series-{number})" for number in range(8))
NEUTRAL = "var(--neutral)"
INK, MUTED, GRID, GOOD, BAD = (f"var(--{name})" for name in ("ink", "muted", "grid", "good", "bad"))
MOST_POINTS = 2_000
_SHOWN_AS_MARKERS = 40  # points; a line of one point would be invisible

Number = float | int | None


def colour(number: int) -> str:
    """The colour of series `number`."""
    return SERIES_COLOURS[number % len(SERIES_COLOURS)]


def shortened(text: str, most: int = 28) -> str:
    """A label of at most `most` characters; the middle of a longer text is left out."""
    return text if len(text) <= most else f"{text[: (most - 1) // 2]}…{text[-(most // 2) :]}"


def axis(title: str, unit: str = "", **options: Any) -> dict[str, Any]:
    """An axis with a title that says its unit. `options` are plotly's."""
    return {"title": {"text": f"{title} ({unit})" if unit else title}, **options}


def thinned(x: Sequence[Any], y: Sequence[Number], most: int = MOST_POINTS) -> tuple[list[Any], list[Number]]:
    """Returns at most `most` points of a series, in their order: the first and the last one, and of each of equally
    long stretches the smallest and the largest value, so that every spike stays visible. A missing value in a stretch
    of other values is left out."""
    if len(x) <= most:
        return list(x), list(y)
    stretches = max(1, (most - 2) // 2)
    inner = len(x) - 2
    kept = [0]
    for number in range(stretches):
        indices = range(1 + number * inner // stretches, 1 + (number + 1) * inner // stretches)
        present = [index for index in indices if y[index] is not None]
        if present:
            smallest = min(present, key=lambda index: y[index])  # type: ignore[arg-type, return-value]
            largest = max(present, key=lambda index: y[index])  # type: ignore[arg-type, return-value]
            kept += sorted({smallest, largest})
        elif len(indices):
            kept.append(indices[0])
    kept.append(len(x) - 1)
    return [x[index] for index in kept], [y[index] for index in kept]


def line(
    name: str,
    x: Sequence[Any],
    y: Sequence[Number],
    hover: str = "%{x}: %{y}",
    line_colour: str | None = None,
    most: int = MOST_POINTS,
    **options: Any,
) -> dict[str, Any]:
    """A line, thinned, with markers if it has few points. `hover` is the text at a point without the line's name;
    `options` are plotly's."""
    x, y = thinned(x, y, most)
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines+markers" if len(x) <= _SHOWN_AS_MARKERS else "lines",
        "name": name,
        "x": x,
        "y": y,
        "hovertemplate": f"%{{fullData.name}}<br>{hover}<extra></extra>",
        "line": {"width": 1.75},
        "marker": {"size": 6},
    }
    if line_colour is not None:
        trace["line"] = {"width": 1.75, "color": line_colour}
        trace["marker"] = {"size": 6, "color": line_colour}
    return {**trace, **options}


def bars(
    name: str,
    x: Sequence[Any],
    y: Sequence[Any],
    hover: str,
    bar_colour: str,
    horizontal: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Bars of one series. With `horizontal`, `x` holds the lengths and `y` the categories."""
    return {
        "type": "bar",
        "name": name,
        "x": list(x),
        "y": list(y),
        "orientation": "h" if horizontal else "v",
        "hovertemplate": f"%{{fullData.name}}<br>{hover}<extra></extra>",
        "marker": {"color": bar_colour, "line": {"width": 0}},
        **options,
    }


def figure(
    traces: Sequence[Mapping[str, Any]], x: Mapping[str, Any], y: Mapping[str, Any], **layout: Any
) -> dict[str, Any]:
    """A figure of these traces and axes. `layout` is plotly's."""
    return {"data": list(traces), "layout": {"xaxis": dict(x), "yaxis": dict(y), **layout}}
