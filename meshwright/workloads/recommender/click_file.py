"""Converts a table of clicks, as CSV or Parquet, to arrays of numbers that are memory-mapped: once, in the cache
folder, and again when the table changes.

The layout of a row is that of Criteo's data sets: a label (1 for a click, 0 for none), integers (13 in Criteo's), and
categories (26 in Criteo's), which may be any text. Fields may be empty. Text files are separated by tabs or commas, and
may have a line of column names. Three files are written, each with one entry per row:

    labels.bin       float32, the label
    integers.bin     float32, log(1 + x) of each integer x; negative and empty ones count as 0
    categories.bin   uint32, a hash of each category, 0 for an empty one
"""

import csv
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.errors import InputError
from meshwright.files.cache import cache_folder, fill_once

SUFFIXES = (".csv", ".tsv", ".txt", ".parquet")
VERSION = 1  # of the cached files: raise it when their content changes
CHUNK = 20_000  # rows that are converted at a time
FLOAT, HASH = np.dtype("<f4"), np.dtype("<u4")


@dataclass(frozen=True)
class ClickArrays:
    """The folder of the converted files, and the number of rows, integers and categories in them."""

    folder: Path
    rows: int
    integers: int
    categories: int

    def open(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the memory-mapped labels (rows,), integers (rows, integers) and categories (rows, categories)."""
        return (
            np.memmap(self.folder / "labels.bin", FLOAT, mode="r", shape=(self.rows,)),
            np.memmap(self.folder / "integers.bin", FLOAT, mode="r", shape=(self.rows, self.integers)),
            np.memmap(self.folder / "categories.bin", HASH, mode="r", shape=(self.rows, self.categories)),
        )


def convert_clicks(file: Path, integers: int, categories: int) -> ClickArrays:
    """Returns the arrays of a table, and writes them if they are not in the cache."""
    state = file.stat()
    settings = [VERSION, integers, categories, str(file.resolve()), state.st_size, state.st_mtime_ns]
    key = hashlib.blake2b(json.dumps(settings).encode(), digest_size=16).hexdigest()

    def write(folder: Path) -> None:
        _write(folder, file, integers, categories)

    folder = fill_once(cache_folder() / "clicks" / key, write)
    rows = (folder / "labels.bin").stat().st_size // FLOAT.itemsize
    return ClickArrays(folder, rows, integers, categories)


def _write(folder: Path, file: Path, integers: int, categories: int) -> None:
    rows = _parquet_rows(file) if file.suffix == ".parquet" else _text_rows(file)
    names = ("labels", "integers", "categories")
    outputs = [(folder / f"{name}.bin").open("wb") for name in names]
    try:
        while chunk := list(islice(rows, CHUNK)):
            for output, array in zip(outputs, _convert(chunk, file, integers, categories), strict=True):
                output.write(array.tobytes())
    finally:
        for output in outputs:
            output.close()
    if not (folder / "labels.bin").stat().st_size:
        raise InputError(f"{file} has no rows: put a table of clicks there")


Row = tuple[int, list[Any]]  # the number of the row in its file, and its fields


def _text_rows(file: Path) -> Iterator[Row]:
    try:
        with file.open(newline="", encoding="utf-8") as opened:
            first = opened.readline()
            opened.seek(0)
            for number, fields in enumerate(csv.reader(opened, delimiter="\t" if "\t" in first else ","), start=1):
                if fields and not (number == 1 and _is_header(fields)):
                    yield number, fields
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{file} is no table of text: {error}") from None


def _is_header(fields: list[str]) -> bool:
    return fields[0].strip() not in ("0", "1")


def _parquet_rows(file: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise InputError(
            f"{file} is a Parquet file, which needs pyarrow: pip install 'meshwright[parquet]', or use a CSV file"
        ) from None
    try:
        number = 0
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=CHUNK):
            for fields in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                number += 1
                yield number, list(fields)
    except (ArrowException, OSError) as error:
        raise InputError(f"{file} cannot be read as a Parquet file: {' '.join(str(error).split())}") from None


def _convert(rows: list[Row], file: Path, integers: int, categories: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the labels, integers and categories of some rows."""
    width = 1 + integers + categories
    labels = np.empty(len(rows), FLOAT)
    numbers = np.empty((len(rows), integers), np.float64)
    hashes = np.empty((len(rows), categories), HASH)
    for place, (line, fields) in enumerate(rows):
        if len(fields) != width:
            raise InputError(
                f"{file}, row {line}: {len(fields)} fields, but a label, {integers} integers and {categories}"
                f" categories are {width}"
            )
        try:
            labels[place] = float(fields[0])
            numbers[place] = [0.0 if _is_empty(field) else float(field) for field in fields[1 : 1 + integers]]
        except (TypeError, ValueError):
            raise InputError(
                f"{file}, row {line}: the label or one of the {integers} fields after it is no number"
            ) from None
        if labels[place] not in (0, 1) or not np.isfinite(numbers[place]).all():
            raise InputError(
                f"{file}, row {line}: the label is {fields[0]} and the integers are {fields[1 : 1 + integers]}: a label"
                " is 0 or 1, and integers are finite"
            )
        hashes[place] = [_hash(field) for field in fields[1 + integers :]]
    return labels, np.log1p(np.maximum(numbers, 0)).astype(FLOAT), hashes


def _is_empty(field: Any) -> bool:
    return field is None or field in ("", b"")


def _hash(category: Any) -> int:
    if _is_empty(category):
        return 0
    return zlib.crc32(category if isinstance(category, bytes) else str(category).encode())
