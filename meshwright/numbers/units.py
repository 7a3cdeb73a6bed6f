"""Numbers with their units, as lines, sentences, tables and pages show them: three digits, without exponents. A dash
stands for None."""

from math import floor, log10

_NONE = "–"
_NOTHING_S = 5e-13  # what remains of differences of equal times
_BYTES = ((2**60, "EiB"), (2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_THOUSANDS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def number_text(value: float | None) -> str:
    """A number such as `80,980`, `12.3` or `0.00123`."""
    if value is None:
        return _NONE
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return text if "e" not in text else f"{value:.{2 - floor(log10(abs(value)))}f}"


def bytes_text(size: float | None) -> str:
    """A size such as `1.23 GiB` or `812 bytes`."""
    if size is None:
        return _NONE
    for unit, name in _BYTES:
        if abs(size) >= unit:
            return f"{number_text(size / unit)} {name}"
    return f"{number_text(size)} bytes"


def seconds_text(seconds: float | None) -> str:
    """A time such as `1.23 s`, `45.6 ms` or `7.89 µs`."""
    if seconds is None:
        return _NONE
    for unit_s, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= unit_s:
            return f"{number_text(seconds / unit_s)} {unit}"
    return "0 s" if abs(seconds) < _NOTHING_S else f"{number_text(seconds / 1e-9)} ns"


def duration_text(seconds: float | None) -> str:
    """A number of seconds in the unit that people would say: `3.2 h`."""
    for unit, length_s in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds is not None and seconds >= 2 * length_s:
            return f"{number_text(seconds / length_s)} {unit}"
    return seconds_text(seconds)


def words_text(value: float) -> str:
    """A number of parameters or tokens in words, such as `124 million`."""
    for word, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if value >= 0.9995 * size:
            return f"{number_text(value / size)} {word}"
    return number_text(value)


def count_text(number: float) -> str:
    """A number such as `124 M`."""
    for size, unit in _THOUSANDS:
        if abs(number) >= size:
            return f"{number_text(number / size)} {unit}"
    return number_text(number)


def bandwidth_text(bytes_per_s: float) -> str:
    """A bandwidth such as `450 GB/s`."""
    return f"{count_text(bytes_per_s)}B/s" if bytes_per_s >= 1e3 else f"{number_text(bytes_per_s)} B/s"
