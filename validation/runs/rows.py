"""The published rows: rows.jsonl has one measured configuration in each line, origins.jsonl where they were read.

`python -m validation.runs.rows FILE` writes both files again from training_runs.json, the file they were collected in.
"""

import json
import sys
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

ROWS = Path(__file__).with_name("rows.jsonl")
ORIGINS = Path(__file__).with_name("origins.jsonl")
OMITTED_KEYS = ("group", "source", "year", "has_time", "has_memory")


@dataclass(frozen=True)
class PublishedRow:
    """One row as it was collected. A field that the publication does not state is None. `origin` is a line number of
    origins.jsonl, from 0."""

    id: str
    origin: int
    model: dict[str, Any]
    hardware: dict[str, Any]
    plan: dict[str, Any]
    measured: dict[str, Any]
    micro_batch: int | None = None
    batch_per_gpu: int | None = None
    grad_accum: int | None = None
    global_batch: int | None = None
    precision: str | None = None
    recompute: str | None = None
    notes: str = ""

    @property
    def source(self) -> str:
        return self.id.rpartition("-")[0]

    @property
    def year(self) -> int:
        return int(origins()[self.origin]["year"])

    @property
    def framework(self) -> str:
        return str(self.plan.get("framework", ""))


@cache
def rows() -> tuple[PublishedRow, ...]:
    return tuple(PublishedRow(**json.loads(line)) for line in ROWS.read_text().splitlines())


@cache
def origins() -> tuple[dict[str, Any], ...]:
    """The repository, path and commit that rows were read from, and how they were read."""
    return tuple(json.loads(line) for line in ORIGINS.read_text().splitlines())


def write_rows(collection: Path) -> None:
    """Writes both files from the collection, in which every row repeats its origin."""
    row_keys = {field.name for field in fields(PublishedRow)}
    origin_lines: dict[str, int] = {}
    lines = []
    for raw in json.loads(collection.read_text())["rows"]:
        origin = origin_lines.setdefault(_line({**raw["source"], "year": raw["year"]}), len(origin_lines))
        row = {"id": raw["id"], "origin": origin, **{key: raw[key] for key in raw if key not in OMITTED_KEYS}}
        assert set(row) <= row_keys, f"{raw['id']}: unknown {set(row) - row_keys}"
        assert PublishedRow(**row).source == raw["group"], raw["id"]
        lines.append(_line(row))
    ROWS.write_text("\n".join(lines) + "\n")
    ORIGINS.write_text("\n".join(origin_lines) + "\n")


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


if __name__ == "__main__":
    write_rows(Path(sys.argv[1]))
