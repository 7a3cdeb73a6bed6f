"""Reads quantities with units that users write: bytes such as `40GB`."""

import re

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
