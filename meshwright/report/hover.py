"""Texts of hover labels and ticks of logarithmic axes, in the form that plotly's charts need."""

from math import ceil, floor, log10
from textwrap import wrap
from typing import Any

from markupsafe import Markup, escape

_WIDTH = 56


def hover_text(text: str, width: int = _WIDTH) -> Markup:
    """Returns a text for a hover label, escaped, in lines that fit on a phone."""
    return Markup("<br>").join(escape(line) for line in wrap(text, width) or [""])


def log_axis(smallest: float, largest: float) -> dict[str, Any]:
    """Plotly's options of a logarithmic axis with ticks at 1, 2 and 5 times powers of ten, written as plain numbers.
    For ranges of more than three powers, ticks are at the powers only."""
    powers = range(floor(log10(smallest)), ceil(log10(largest)) + 1)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    ticks = [factor * 10.0**power for power in powers for factor in factors]
    texts = [f"{tick:,.0f}" if tick >= 1 else f"{tick:.6g}" for tick in ticks]
    limits = [log10(smallest) - 0.06, log10(largest) + 0.06]
    return {"type": "log", "tickmode": "array", "tickvals": ticks, "ticktext": texts, "range": limits}
