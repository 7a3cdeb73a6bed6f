"""Numbers with their units, as tables and sentences about plans show them: three digits, without exponents. A dash
stands for None."""

from math import floor, log10

_GIB = 2**30
_NONE = "–"


def gib(size: float) -> str:
    if 0 < size < 2**20:
        return f"{size / 2**10:.3g} KiB" if size >= 1000 else f"{size:.0f} bytes"
    if size < _GIB:
        return f"{size / 2**20:.3g} MiB"
    return f"{size / _GIB:.3g} GiB" if size < 1000 * _GIB else f"{size / _GIB:,.0f} GiB"


def plain_number(value: float | None) -> str:
    """A number of samples per second, or a price."""
    if value is None:
        return _NONE
    text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return text if "e" not in text else f"{value:.{2 - floor(log10(value))}f}"


def count(value: float) -> str:
    """A number of parameters or tokens in words, such as 124 million."""
    for words, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if value >= 0.9995 * size:
            return f"{plain_number(value / size)} {words}"
    return plain_number(value)


def seconds(value: float | None) -> str:
    if value is None:
        return _NONE
    if value < 1e-3:
        return f"{value * 1e6:.3g} µs"
    return f"{plain_number(value)} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def duration(value_s: float | None) -> str:
    """A number of seconds in the unit that people would say."""
    if value_s is None:
        return _NONE
    for unit, length_s in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if value_s >= 2 * length_s:
            return f"{plain_number(value_s / length_s)} {unit}"
    return seconds(value_s)
