"""Writes a predicted timeline as a file that chrome://tracing and ui.perfetto.dev open.

    ts, dur = seconds × 10⁶        pid = rank        tid = category, numbered in order of appearance      write_trace

Each rank is a process and each category of spans (compute, communication, ...) a thread of it, so that spans which
overlap are drawn on different lines.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.files.storage import write_atomically
from meshwright.simulator.pipeline.timeline import Timeline

MICROSECONDS = 1e6


class Span(NamedTuple):
    """An action of a rank with its start and duration. Spans of one rank and category do not overlap."""

    name: str
    category: str
    rank: int
    start_s: float
    duration_s: float


def timeline_spans(timeline: Timeline, category: str = "compute") -> Iterator[Span]:
    """The spans of a timeline, with names such as `forward 7 (stage 2)` for microbatch 7."""
    for rank, stage, microbatch, kind, start_s, end_s in timeline.events():
        name = f"{kind.replace('_', ' ')} {microbatch} (stage {stage})"
        yield Span(name, category, rank, start_s, end_s - start_s)


def write_trace(path: Path, spans: Iterable[Span]) -> Path:
    """Writes the spans to the file `path` and returns the path. The times of all spans count from the same moment."""
    threads: dict[str, int] = {}
    lines: set[tuple[int, str]] = set()
    events: list[dict[str, Any]] = []
    for span in spans:
        thread = threads.setdefault(span.category, len(threads))
        lines.add((span.rank, span.category))
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.category,
                "pid": span.rank,
                "tid": thread,
                "ts": span.start_s * MICROSECONDS,
                "dur": span.duration_s * MICROSECONDS,
            }
        )
    names = [_name_event("process", rank, 0, f"rank {rank}") for rank in sorted({rank for rank, _ in lines})]
    names += [_name_event("thread", rank, threads[category], category) for rank, category in sorted(lines)]
    write_atomically(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": names + events}))
    return path


def _name_event(kind: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": f"{kind}_name", "pid": rank, "tid": thread, "args": {"name": name}}
