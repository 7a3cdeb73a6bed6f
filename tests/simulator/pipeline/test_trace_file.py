"""The trace file has the format that Chrome and Perfetto read, and the times of the timeline."""

import json
from pathlib import Path

import pytest

from meshwright.simulator.pipeline.order import pipeline_order
from meshwright.simulator.pipeline.timeline import timeline
from meshwright.simulator.pipeline.trace_file import Span, timeline_spans, write_trace


def test_a_timeline_is_written_with_its_times(tmp_path: Path) -> None:
    schedule = timeline(pipeline_order("1f1b", 3, 1, 5), lambda a: 0.001 * (1 + a.stage), lambda _, __: 0.0002)
    events = json.loads(write_trace(tmp_path / "trace.json", timeline_spans(schedule)).read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 3 * 5 * 2
    for span, event in zip(spans, schedule.events(), strict=True):
        assert span["pid"] == event.rank
        assert span["ts"] == pytest.approx(event.start_s * 1e6)
        assert span["ts"] + span["dur"] == pytest.approx(event.end_s * 1e6)
    assert spans[0]["name"] == "forward 0 (stage 0)"
    assert max(span["ts"] + span["dur"] for span in spans) == pytest.approx(schedule.span_s * 1e6)


def test_ranks_are_processes_and_categories_their_threads(tmp_path: Path) -> None:
    spans = [
        Span("block 3", "compute", 0, 0.0, 0.5),
        Span("all-reduce", "communication", 0, 0.25, 0.5),
        Span("block 3", "compute", 12, 0.0, 0.5),
    ]
    events = json.loads(write_trace(tmp_path / "trace.json", iter(spans)).read_text())["traceEvents"]
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {
        ("process_name", 0, 0): "rank 0",
        ("process_name", 12, 0): "rank 12",
        ("thread_name", 0, 0): "compute",
        ("thread_name", 0, 1): "communication",
        ("thread_name", 12, 0): "compute",
    }
    assert [(e["tid"], e["cat"]) for e in events if e["ph"] == "X"] == [
        (0, "compute"),
        (1, "communication"),
        (0, "compute"),
    ]
