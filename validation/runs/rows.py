"""The published rows that the project carries: rows.jsonl, one measured configuration a line, and where it was read.

`python -m validation.runs.rows FILE` makes both files anew from the collection's training_runs.json.
"""

import json
import sys
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

ROWS = Path(__file__).with_name("rows.jsonl")
ORIGINS = Path(__file__).with_name("origins.jsonl")
LEFT_OUT = ("group", "source", "year", "has_time", "has_memory")


@dataclass(frozen=True)
class Row:
    """As it was collected; a field that the publication does not give is None. `origin` is a line of origins.jsonl."""

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
def rows() -> tuple[Row, ...]:
    return tuple(Row(**json.loads(line)) for line in ROWS.read_text().splitlines())


@cache
def origins() -> tuple[dict[str, Any], ...]:
    """Repository, path and commit that rows were read from, and how."""
    return tuple(json.loads(line) for line in ORIGINS.read_text().splitlines())


def carry(collection: Path) -> None:
    """Writes both files from the collection, in which every row repeats its origin."""
    known = {field.name for field in fields(Row)}
    seen: dict[str, int] = {}
    lines = []
    for raw in json.loads(collection.read_text())["rows"]:
        origin = seen.setdefault(_line({**raw["source"], "year": raw["year"]}), len(seen))
        row = {"id": raw["id"], "origin": origin, **{key: raw[key] for key in raw if key not in LEFT_OUT}}
        assert set(row) <= known, f"{raw['id']}: unknown {set(row) - known}"
        assert Row(**row).source == raw["group"], raw["id"]
        lines.append(_line(row))
    ROWS.write_text("\n".join(lines) + "\n")
    ORIGINS.write_text("\n".join(seen) + "\n")


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


if __name__ == "__main__":
    carry(Path(sys.argv[1]))
