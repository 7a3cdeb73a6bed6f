"""Reads quantities with units that users write: bytes such as `40GB`, numbers of tokens such as `1B`."""

import re
from fractions import Fraction

from meshwright.errors import InputError

_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_BYTES["tib"] = 2**40
_QUANTITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)")
_LEAST_BYTES = 10**6


def read_bytes(text: str | int, source: str) -> int:
    """Returns the bytes of a device's memory that `40GB`, `512MiB` or a plain number stands for. `source` is named in
    errors."""
    match = _QUANTITY.fullmatch(str(text).strip()) if not isinstance(text, bool) else None
    factor = _BYTES.get(match[2].lower()) if match else None
    if match is None or factor is None or (size := int(float(match[1]) * factor)) < 1:
        raise InputError(f"{source} is {text!r}: write a size such as 40GB (10⁹ bytes) or 40GiB (2³⁰ bytes)")
    if size < _LEAST_BYTES:
        raise InputError(f"{source} is {text!r}, which is {size:,} bytes, below 1 MB: write the unit, such as 40GB")
    return size


_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_COUNTS |= {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_COUNT = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,12})?)(?:e([0-9]{1,2}))?\s*([A-Za-z]*)")
_MOST_COUNTED = 10**18


def read_count(text: str, source: str) -> int:
    """Returns the number of tokens or samples that `1B`, `1.5T`, `300M`, `1 billion`, `1e9` or `1,000,000,000` stands
    for. `source` is named in errors."""
    plain = text.strip()
    if re.fullmatch(r"[0-9]{1,3}(?:[,_][0-9]{3})+", plain):
        plain = plain.replace(",", "").replace("_", "")
    match = _COUNT.fullmatch(plain)
    factor = _COUNTS.get(match[3].lower()) if match else None
    if match is None or factor is None:
        raise InputError(f"{source} is {text!r}: write a number such as 1B, 1.5T, 300M, 1e9 or 1,000,000,000")
    count = round(Fraction(match[1]) * 10 ** int(match[2] or 0) * factor)
    if not 1 <= count <= _MOST_COUNTED:
        raise InputError(f"{source} is {text!r}: write a number from 1 to {_MOST_COUNTED:.0e}")
    return count
