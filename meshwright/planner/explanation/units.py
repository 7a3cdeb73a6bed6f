"""Numbers with their units, as tables and sentences about plans show them: three digits, without exponents. A dash
stands for None."""

_GIB = 2**30
_NONE = "–"


def gib(size: float) -> str:
    if size < _GIB:
        return f"{size / 2**20:.3g} MiB"
    return f"{size / _GIB:.3g} GiB" if size < 1000 * _GIB else f"{size / _GIB:,.0f} GiB"


def plain_number(value: float | None) -> str:
    """A number of samples per second, or a price."""
    if value is None:
        return _NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


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
            return f"{value_s / length_s:.3g} {unit}"
    return seconds(value_s)
