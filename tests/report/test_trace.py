"""Traces of predicted and of profiled steps."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.report.page import Table
from meshwright.report.run.page import run_page
from meshwright.report.trace import copy_memory_snapshot, predicted_spans, write_run_trace
from meshwright.train.output.folder import RunFolder
from meshwright.train.output.step_profile import snapshot_file, trace_file
from tests.report.made_up_run import make_run


def spans(file: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]


def write_profile(run: Path, rank: int, base_ns: int, pid: int) -> None:
    """A trace as torch.profiler writes it: an all-reduce of Gloo of 4,000 bytes, and an operator."""
    arguments = {"Input Dims": [[1000]], "Input type": ["float"]}
    common = {"ph": "X", "pid": pid, "tid": 1}
    events = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": "python"}},
        {**common, "cat": "user_annotation", "name": "gloo:all_reduce", "ts": 10.0, "dur": 200.0, "args": arguments},
        {**common, "cat": "cpu_op", "name": "aten::add", "ts": 20.0, "dur": 5.0},
    ]
    folder = RunFolder(run).profile
    folder.mkdir(exist_ok=True)
    content = json.dumps({"baseTimeNanoseconds": base_ns, "traceEvents": events})
    trace_file(folder, rank).write_bytes(gzip.compress(content.encode()))


def test_without_a_profile_the_predicted_step_is_traced(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=20)
    events = spans(write_run_trace(run, tmp_path / "trace.json"))
    assert [event["name"] for event in events] == ["compute", "launch", "replicate", "optimizer"]
    assert events[-1]["ts"] + events[-1]["dur"] == pytest.approx(0.2e6)


def test_the_passes_of_a_pipeline_are_spans_of_their_ranks() -> None:
    prediction = {
        "timeline": [[0, 0, 0, "forward", 0.0, 1.0], [1, 1, 0, "forward", 1.0, 2.0]],
        "breakdown": {"compute": 2.0, "optimizer": 0.5},
    }
    found = [(span.rank, span.name, span.start_s) for span in predicted_spans(prediction)]
    assert found == [
        (0, "forward 0 (stage 0)", 0.0),
        (1, "forward 0 (stage 1)", 1.0),
        (0, "optimizer", 2.0),
        (1, "optimizer", 2.0),
    ]


def test_the_traces_of_ranks_are_joined_on_one_clock(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ranks=2, steps=20)
    write_profile(run, 0, base_ns=1_000_000, pid=7)
    write_profile(run, 1, base_ns=3_000_000, pid=7)
    events = spans(write_run_trace(run, tmp_path / "trace.json"))
    assert sorted((event["pid"], event["ts"]) for event in events if event["name"] == "aten::add") == [
        (0, 20.0),
        (1, 2_020.0),
    ]


def test_the_collectives_of_profiled_steps_are_on_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ranks=2, steps=20)
    for rank in range(2):
        write_profile(run, rank, 0, rank)
    section = next(section for section in run_page(run).sections if section.title == "Profiled steps")
    table = section.parts[0]
    assert isinstance(table, Table)
    assert list(table.rows[0][:4]) == ["all_reduce", "3.91 KiB", 1.0, pytest.approx(0.2)]


def test_a_damaged_profile_is_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ranks=2, steps=20)
    write_profile(run, 0, 0, 0)
    trace_file(RunFolder(run).profile, 0).write_bytes(b"no trace")
    assert "Profiled steps" in [section.title for section in run_page(run).sections]
    with pytest.raises(InputError, match="cannot be read"):
        write_run_trace(run, tmp_path / "trace.json")


def test_a_memory_snapshot_is_copied_or_refused_with_the_reason(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=20)
    with pytest.raises(InputError, match="no steps were profiled"):
        copy_memory_snapshot(run, tmp_path / "memory.pickle")
    RunFolder(run).device.write_text("cpu Neoverse\n")
    with pytest.raises(InputError, match="on a CPU"):
        copy_memory_snapshot(run, tmp_path / "memory.pickle")
    RunFolder(run).profile.mkdir()
    snapshot_file(RunFolder(run).profile, 0).write_bytes(b"snapshot")
    assert copy_memory_snapshot(run, tmp_path / "memory.pickle").read_bytes() == b"snapshot"
