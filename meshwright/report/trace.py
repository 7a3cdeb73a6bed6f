"""Traces of steps that ui.perfetto.dev and chrome://tracing open: of the measured steps that a run has profiled, or of
the predicted step; and the memory snapshot of a run on a GPU.

    predicted_spans     page.json's or a plan's prediction (page_values.prediction_values) → spans
    write_predicted_trace, write_run_trace, copy_memory_snapshot
"""

import gzip
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.files.storage import replacing, write_atomically
from meshwright.report.run.record import RunRecord, read_run
from meshwright.simulator.pipeline.trace_file import Span, write_trace

_HOW_TO_PROFILE = "train with --profile-steps 10:13, for example"


def predicted_spans(prediction: Mapping[str, Any]) -> Iterator[Span]:
    """Yields the spans of a predicted step: the passes of each pipeline rank, or, without a pipeline, the terms of the
    step one after the other. What follows the passes, such as the optimizer, begins after the last pass."""
    timeline = prediction.get("timeline") or []
    breakdown = {name: float(seconds) for name, seconds in prediction["breakdown"].items() if seconds > 0}
    start_s, ranks = 0.0, {0}
    for rank, stage, microbatch, kind, begin_s, end_s in timeline:
        yield Span(
            f"{str(kind).replace('_', ' ')} {microbatch} (stage {stage})", "passes", rank, begin_s, end_s - begin_s
        )
        start_s = max(start_s, end_s)
        ranks.add(rank)
    terms = breakdown
    if timeline:  # the passes hold the other terms
        terms = {name: breakdown[name] for name in ("input", "optimizer", "replicate", "shard") if name in breakdown}
    for rank in sorted(ranks):
        at_s = start_s
        for name, seconds in terms.items():
            yield Span(name, "step", rank, at_s, seconds)
            at_s += seconds


def write_predicted_trace(prediction: Mapping[str, Any], path: Path) -> Path:
    """Writes the trace of a predicted step."""
    return write_trace(path, predicted_spans(prediction))


def write_run_trace(run: Path, path: Path) -> Path:
    """Writes the trace of the profiled steps of all ranks or, of a run that profiled none, that of the predicted
    step."""
    record = read_run(run)
    if profiled_ranks(record):
        return _write_measured_trace(record, path)
    prediction = record.page.get("prediction")
    if not isinstance(prediction, Mapping) or not isinstance(prediction.get("breakdown"), Mapping):
        raise InputError(f"--trace {path}: {run} has neither profiled steps nor a prediction: {_HOW_TO_PROFILE}")
    return write_predicted_trace(prediction, path)


def profiled_ranks(record: RunRecord) -> dict[int, Path]:
    """The traces that a run has written, by rank."""
    files = {
        file.name.removeprefix("rank-").removesuffix(".json.gz"): file
        for file in record.folder.profile.glob("rank-*.json.gz")
    }
    return {int(rank): files[rank] for rank in sorted(files, key=str) if rank.isdigit()}


def read_trace(file: Path) -> dict[str, Any]:
    """Returns a trace that torch.profiler wrote. Raises an `InputError` if it is damaged."""
    try:
        with gzip.open(file, "rt", encoding="utf-8") as stream:
            trace = json.load(stream)
        if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
            raise ValueError("it has no events")
        return trace
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{file} cannot be read: {error}") from None


def _write_measured_trace(record: RunRecord, path: Path) -> Path:
    """Joins the traces of all ranks on one clock. The processes of a trace get other numbers, because those of two
    machines may be equal."""
    events: list[dict[str, Any]] = []
    numbers: dict[tuple[int, Any], int] = {}
    base_ns: int | None = None
    for rank, file in profiled_ranks(record).items():
        trace = read_trace(file)
        rank_base_ns = int(trace.get("baseTimeNanoseconds", 0))
        base_ns = rank_base_ns if base_ns is None else base_ns
        shift_us = (rank_base_ns - base_ns) / 1e3
        for event in trace["traceEvents"]:
            if not isinstance(event, dict) or event.get("ph") is None:
                continue
            number = numbers.setdefault((rank, event.get("pid")), len(numbers))
            joined = {**event, "pid": number}
            if isinstance(event.get("ts"), int | float):
                joined["ts"] = event["ts"] + shift_us
            if "id" in event:
                joined["id"] = f"{rank}.{event['id']}"
            if event.get("name") == "process_name":
                joined["args"] = {"name": f"rank {rank}: {event.get('args', {}).get('name', '')}"}
            if event.get("name") == "process_sort_index":
                joined["args"] = {"sort_index": number}
            events.append(joined)
    content = json.dumps({"displayTimeUnit": "ms", "traceEvents": events}).encode()
    write_atomically(path, gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return path


def copy_memory_snapshot(run: Path, path: Path) -> Path:
    """Copies the memory snapshot of the lowest rank that wrote one, for pytorch.org/memory_viz."""
    record = read_run(run)
    files = sorted(record.folder.profile.glob("rank-*-memory.pickle"), key=lambda file: (len(file.name), file.name))
    if not files:
        reason = (
            "its ranks were on a CPU, and PyTorch records the history of memory on GPUs only"
            if record.device.startswith("cpu")
            else f"no steps were profiled: {_HOW_TO_PROFILE}, on a GPU"
        )
        raise InputError(f"--memory-snapshot {path}: {run} has no memory snapshot: {reason}")
    with replacing(path) as draft:
        shutil.copyfile(files[0], draft)
    return path
