"""A predicted timeline as a file that chrome://tracing and ui.perfetto.dev open.

    ts, dur = seconds × 10⁶        pid = rank        tid = category, numbered in order of appearance      write_trace

Each rank is a process and each category of spans (compute, communication, ...) a thread of it, so what overlaps lies
on lines of its own.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.simulator.pipeline.timeline import Timeline

MICROSECONDS = 1e6


class Span(NamedTuple):
    """Something that takes time on a rank. Spans of one rank and category do not overlap."""

    name: str
    category: str
    rank: int
    start_s: float
    duration_s: float


def spans_of(found: Timeline, category: str = "compute") -> Iterator[Span]:
    """`forward 7 (stage 2)` is what microbatch 7 does there."""
    for rank, stage, microbatch, kind, start_s, end_s in found.events():
        name = f"{kind.replace('_', ' ')} {microbatch} (stage {stage})"
        yield Span(name, category, rank, start_s, end_s - start_s)


def write_trace(path: Path, spans: Iterable[Span]) -> Path:
    """Writes the spans, all on one clock that starts at 0."""
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
    names = [_name("process", rank, 0, f"rank {rank}") for rank in sorted({rank for rank, _ in lines})]
    names += [_name("thread", rank, threads[category], category) for rank, category in sorted(lines)]
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": names + events}))
    return path


def _name(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": rank, "tid": thread, "args": {"name": name}}
