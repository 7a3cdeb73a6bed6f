"""Numbers with their units, as pages show them: seconds, bytes, counts and bandwidths."""

_STEPS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_NOTHING_S = 5e-13  # what remains of differences of equal times


def seconds_text(seconds: float | None) -> str:
    """Returns a duration such as `1.23 s`, `45.6 ms` or `7.89 µs`; `not measured` for None."""
    if seconds is None:
        return "not measured"
    for unit_s, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= unit_s:
            return f"{_digits(seconds / unit_s)} {unit}"
    return "0 s" if abs(seconds) < _NOTHING_S else f"{_digits(seconds / 1e-9)} ns"


def bytes_text(size: float | None) -> str:
    """Returns a size such as `1.23 GiB`; `not measured` for None."""
    if size is None:
        return "not measured"
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(size) >= 1024**power:
            return f"{_digits(size / 1024**power)} {unit}"
    return f"{_digits(size)} bytes"


def count_text(number: float) -> str:
    """Returns a number such as `124 M`, with three digits."""
    for size, unit in _STEPS:
        if abs(number) >= size:
            return f"{_digits(number / size)} {unit}"
    return _digits(number)


def bandwidth_text(bytes_per_s: float) -> str:
    """Returns a bandwidth such as `450 GB/s`."""
    return f"{count_text(bytes_per_s)}B/s" if bytes_per_s >= 1e3 else f"{_digits(bytes_per_s)} B/s"


def speed_text(per_second: float) -> str:
    """Returns a speed such as `80,980` or `12.35`, without an exponent."""
    return f"{per_second:,.0f}" if per_second >= 1000 else f"{per_second:.4g}"


def _digits(number: float) -> str:
    """Three significant digits, without an exponent."""
    if abs(number) >= 100:
        return f"{number:,.0f}"
    text = f"{number:.3g}"
    return text if "e" not in text else f"{number:.3f}"
