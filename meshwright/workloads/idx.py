"""Reads IDX, the file format of MNIST. For a damaged file or one of another format, raises an error of a single
line."""

import gzip
import struct
import zlib
from math import prod
from pathlib import Path

import numpy as np

from meshwright.errors import InputError

_GZIP = b"\x1f\x8b"
_UNSIGNED_BYTE = 0x08
_REMEDY = "download it again"


def read_idx(path: str | Path) -> np.ndarray:
    """Returns the array of an IDX file of unsigned bytes, gzipped or not."""
    content = _read_content(Path(path))
    # Two zero bytes, the type of the elements, the number of dimensions, then the length of each dimension.
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _UNSIGNED_BYTE or content[3] == 0:
        raise InputError(
            f"{path}: not an IDX file of unsigned bytes: it begins with magic number 0x{content[:4].hex()}, "
            "not 0x00000801 (labels) or 0x00000803 (images): put the original MNIST file there"
        )
    dims = content[3]
    header = 4 + 4 * dims
    if len(content) < header:
        raise InputError(
            f"{path}: its header needs {header} bytes, the file has {len(content)}: it is cut short, {_REMEDY}"
        )
    shape = struct.unpack(f">{dims}I", content[4:header])
    expected_bytes, data_bytes = prod(shape), len(content) - header
    if data_bytes != expected_bytes:
        state = "cut short" if data_bytes < expected_bytes else "longer than it should be"
        sizes = " × ".join(str(length) for length in shape)
        raise InputError(
            f"{path}: its header says {sizes} = {expected_bytes} bytes, but {data_bytes} follow: it is {state},"
            f" {_REMEDY}"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _read_content(path: Path) -> bytes:
    """Returns the bytes of a file, decompressed if it is gzipped."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if not raw.startswith(_GZIP):
        if path.suffix == ".gz":
            raise InputError(f"{path}: not a gzip file, though its name ends in .gz: {_REMEDY}, or rename it")
        return raw
    try:
        return gzip.decompress(raw)
    except EOFError:
        raise InputError(f"{path}: the gzip file is truncated after {len(raw)} bytes: {_REMEDY}") from None
    except (OSError, zlib.error) as error:
        raise InputError(f"{path}: the gzip file is damaged ({error}): {_REMEDY}") from None
