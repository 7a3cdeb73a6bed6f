"""Reads and writes NIfTI-1 files (.nii, .nii.gz), the usual format of medical volumes, with numpy only.

A file begins with a header of 348 bytes; the fields that are used here, by their offset in it:

    0    sizeof_hdr   348, in the byte order of the whole file
    40   dim          the number of dimensions, then the size of each
    70   datatype     a key of `_DTYPES`
    108  vox_offset   where the voxels begin; the first index is the fastest
    112  scl_slope    unless it is 0, a voxel stands for scl_slope · number + scl_inter
    116  scl_inter
    344  magic        "n+1" if the voxels are in the same file
"""

import gzip
import math
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

import numpy as np

from meshwright.errors import InputError

SUFFIXES = (".nii", ".nii.gz")
_HEADER_BYTES = 348
_FIRST_VOXEL = 352  # of the files that are written: the header, and four zeros that say that no extension follows
_NIFTI_2 = 540  # the size of a header of version 2
_DTYPES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8", 256: "i1", 512: "u2", 768: "u4", 1024: "i8", 1280: "u8"}
_CODES = {np.dtype(name): code for code, name in _DTYPES.items()}


def read_nifti(file: Path) -> np.ndarray:
    """Returns the voxels of a file, indexed (x, y, z, ...), without dimensions of size 1 at the end. They have the
    file's dtype, or float32 if the file scales its numbers."""
    with _reading(file) as stream:
        header = stream.read(_HEADER_BYTES)
        order = _byte_order(header, file)
        count, *sizes = struct.unpack_from(f"{order}8h", header, 40)
        (code,) = struct.unpack_from(f"{order}h", header, 70)
        offset, slope, intercept = struct.unpack_from(f"{order}3f", header, 108)
        if header[344:347] != b"n+1":
            raise InputError(f"{file} has its voxels in another file (.img): convert it to a single .nii file")
        if not 1 <= count <= 7 or any(size < 1 for size in sizes[:count]):
            raise InputError(f"{file} is damaged: it has {count} dimensions of sizes {sizes}")
        if code not in _DTYPES:
            raise InputError(f"{file} has voxels of the NIfTI datatype {code}: convert it to integers or floats")
        if not _HEADER_BYTES <= offset < 2**31:
            raise InputError(f"{file} is damaged: its voxels begin at byte {offset}")
        voxels = _read_voxels(stream, np.dtype(order + _DTYPES[code]), sizes[:count], int(offset), file)
    return _scaled(voxels, slope, intercept)


def write_nifti(file: Path, voxels: np.ndarray) -> None:
    """Writes voxels of one of the dtypes in `_DTYPES` to a file, compressed if its name ends in .gz."""
    dtype = voxels.dtype.newbyteorder("=")
    header = bytearray(_FIRST_VOXEL)
    struct.pack_into("<i", header, 0, _HEADER_BYTES)
    struct.pack_into("<8h", header, 40, voxels.ndim, *voxels.shape, *[1] * (7 - voxels.ndim))
    struct.pack_into("<2h", header, 70, _CODES[dtype], 8 * dtype.itemsize)
    struct.pack_into("<8f", header, 76, *[1.0] * 8)  # every voxel is a cube of 1 mm
    struct.pack_into("<3f", header, 108, _FIRST_VOXEL, 1.0, 0.0)
    header[344:348] = b"n+1\0"
    content = bytes(header) + voxels.astype(dtype.newbyteorder("<")).tobytes(order="F")
    file.write_bytes(gzip.compress(content, mtime=0) if file.suffix == ".gz" else content)


@contextmanager
def _reading(file: Path) -> Iterator[IO[bytes]]:
    try:
        with cast(IO[bytes], gzip.open(file) if file.suffix == ".gz" else file.open("rb")) as stream:
            yield stream
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{file} is damaged: {error}") from None


def _byte_order(header: bytes, file: Path) -> str:
    if len(header) == _HEADER_BYTES:
        for order in ("<", ">"):
            (size,) = struct.unpack_from(f"{order}i", header)
            if size == _HEADER_BYTES:
                return order
            if size == _NIFTI_2:
                raise InputError(f"{file} is a NIfTI-2 file: convert it to NIfTI-1")
    raise InputError(f"{file} is no NIfTI file: it does not begin with the header of one")


def _read_voxels(stream: IO[bytes], dtype: np.dtype, sizes: list[int], offset: int, file: Path) -> np.ndarray:
    stream.read(offset - _HEADER_BYTES)
    size = math.prod(sizes) * dtype.itemsize
    content = bytearray()
    while len(content) < size and (chunk := stream.read(min(size - len(content), 2**24))):
        content += chunk  # in chunks, so that a damaged header does not make us allocate what the file does not have
    if len(content) < size:
        raise InputError(f"{file} is damaged: it has {len(content)} bytes of voxels, but its sizes need {size}")
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes = sizes[:-1]
    return np.frombuffer(content, dtype).reshape(sizes, order="F").astype(dtype.newbyteorder("="), copy=False)


def _scaled(voxels: np.ndarray, slope: float, intercept: float) -> np.ndarray:
    is_scaled = math.isfinite(slope) and math.isfinite(intercept) and slope != 0 and (slope, intercept) != (1, 0)
    if not is_scaled:
        return voxels
    return voxels.astype(np.float32) * np.float32(slope) + np.float32(intercept)
