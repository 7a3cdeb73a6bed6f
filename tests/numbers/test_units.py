"""Numbers as text."""

from collections.abc import Callable

import pytest

from meshwright.numbers.units import (
    bandwidth_text,
    bytes_text,
    count_text,
    duration_text,
    number_text,
    seconds_text,
    words_text,
)


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        (bytes_text, None, "–"),
        (bytes_text, 0, "0 bytes"),
        (bytes_text, 812, "812 bytes"),
        (bytes_text, 1536, "1.5 KiB"),
        (bytes_text, 1023 * 2**20, "1,023 MiB"),
        (bytes_text, 80 * 2**30, "80 GiB"),
        (bytes_text, -1.234 * 2**40, "-1.23 TiB"),
        (seconds_text, None, "–"),
        (seconds_text, 0, "0 s"),
        (seconds_text, 2e-6, "2 µs"),
        (seconds_text, 0.01234, "12.3 ms"),
        (seconds_text, 12345, "12,345 s"),
        (duration_text, 90.0, "90 s"),
        (duration_text, 7200.0, "2 h"),
        (number_text, 0.0001234, "0.000123"),
        (number_text, 80980, "80,980"),
        (words_text, 124_000_000, "124 million"),
        (words_text, 999_600_000, "1 billion"),
        (count_text, 1.5e12, "1.5 T"),
        (bandwidth_text, 450e9, "450 GB/s"),
        (bandwidth_text, 12.0, "12 B/s"),
    ],
)
def test_numbers_have_three_digits_and_a_unit(text: Callable[[float | None], str], value: float, expected: str) -> None:
    assert text(value) == expected
