"""The section of a run's page about profiled steps (`log.profile_steps`): what the device or the processor was busy
with, and which collectives ran, by size.

    busy with both       computing and communicating kernels at the same time: the exchange costs nothing
    communicating alone  the exchange keeps the device from computing
    idle                 neither; the host has not submitted any work, or the rank waits
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from meshwright.bench.intervals import Interval, length, union
from meshwright.errors import InputError
from meshwright.numbers.units import bytes_text
from meshwright.report.charts import axis, bars, colour, figure
from meshwright.report.page import Chart, Lines, Part, Section, Table, TableCell
from meshwright.report.run.record import RunRecord
from meshwright.report.trace import profiled_ranks, read_trace

_MOST_RANKS = 8  # whose traces are read for the page
_LARGE_BYTES = 64 * 1024  # the time of smaller messages is latency, and a bandwidth says nothing
_COMMUNICATION = ("nccl", "gloo:", "mpi:")
# The names that NCCL's kernels and Gloo's annotations give to dtypes.
_DTYPE_BYTES = {
    "Double": 8,
    "Long": 8,
    "Float": 4,
    "Int": 4,
    "Half": 2,
    "BFloat16": 2,
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
    "double": 8,
    "long int": 8,
    "float": 4,
    "int": 4,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "unsigned char": 1,
    "signed char": 1,
    "bool": 1,
    "Float8_e4m3fn": 1,
    "Float8_e5m2": 1,
}


@dataclass(frozen=True)
class Collective:
    """A collective of a profiled step. `seconds` is how long it ran."""

    name: str
    bytes: int
    seconds: float


def profile_sections(run: RunRecord) -> Iterator[Section]:
    """Yields the section, if the run has profiled steps."""
    files = profiled_ranks(run)
    if not files:
        return
    parts: list[Part] = []
    try:
        events = {rank: read_trace(files[rank])["traceEvents"] for rank in list(files)[:_MOST_RANKS]}
    except InputError as error:
        yield Section("Profiled steps", "", [Lines([str(error)])])
        return
    busy = {rank: _busy(rank_events) for rank, rank_events in events.items()}
    shown = {rank: seconds for rank, seconds in busy.items() if seconds is not None}
    if shown:
        parts.append(_busy_chart(shown))
    collectives = [collective for rank_events in events.values() for collective in _collectives(rank_events)]
    if collectives:
        parts.append(_collective_table(collectives, len(events)))
    most = f" of the first {_MOST_RANKS} ranks" if len(files) > _MOST_RANKS else ""
    first, end = (run.job.get("log") or {}).get("profile_steps") or (None, None)
    which = f"Steps {first} to {end - 1}{most}" if isinstance(first, int) and isinstance(end, int) else "Some steps"
    yield Section(
        "Profiled steps",
        f"{which}, recorded with torch.profiler, which makes them slower than the others. The whole trace:"
        " meshwright report RUN --trace FILE, then open it in ui.perfetto.dev. Exchanges through shared memory are not"
        " PyTorch's, and have no line in the table.",
        parts,
    )


def _busy(events: Sequence[Any]) -> dict[str, float] | None:
    """What a GPU was busy with, in seconds; None without kernels of a GPU."""
    computing: list[Interval] = []
    communicating: list[Interval] = []
    for event in events:
        if isinstance(event, dict) and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            span = (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
            (communicating if _is_communication(event["name"]) else computing).append(span)
    if not computing:
        return None
    every = union([*computing, *communicating])
    alone_s, exchange_s, any_s = length(union(computing)), length(union(communicating)), length(every)
    both_s = alone_s + exchange_s - any_s
    return {
        "computing alone": alone_s - both_s,
        "computing and communicating": both_s,
        "communicating alone": exchange_s - both_s,
        "idle": every[-1][1] - every[0][0] - any_s,
    }


def _is_communication(name: str) -> bool:
    return name.lower().startswith(_COMMUNICATION)


def _busy_chart(busy: dict[int, dict[str, float]]) -> Chart:
    colours = dict(zip(next(iter(busy.values())), (colour(0), colour(4), colour(1), colour(7)), strict=True))
    ranks = list(busy)
    traces = [
        bars(kind, ranks, [busy[rank][kind] * 1e3 for rank in ranks], "rank %{x}: %{y:.4g} ms", colours[kind])
        for kind in colours
    ]
    layout = figure(traces, axis("rank", dtick=1), axis("time of the profiled steps", "ms"), barmode="stack")
    return Chart("What the devices were busy with", layout)


def _collectives(events: Sequence[Any]) -> Iterator[Collective]:
    """Yields the collectives of a trace: the kernels of NCCL, or the annotations of Gloo."""
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X" or not _is_communication(str(event.get("name", ""))):
            continue
        arguments, seconds = event.get("args", {}), float(event.get("dur", 0.0)) / 1e6
        if event.get("cat") == "kernel":
            elements, dtype = arguments.get("In msg nelems", 0), str(arguments.get("dtype"))
            name = str(arguments.get("Collective name", event["name"]))
            yield Collective(name, int(elements) * _DTYPE_BYTES.get(dtype, 4), seconds)
        elif event.get("cat") == "user_annotation" and arguments.get("Input Dims"):
            shapes, types = arguments["Input Dims"], arguments.get("Input type", [])
            sizes = (prod(shape) * _DTYPE_BYTES.get(dtype, 4) for shape, dtype in zip(shapes, types, strict=False))
            yield Collective(str(event["name"]).partition(":")[2], sum(sizes), seconds)


def _collective_table(collectives: Sequence[Collective], ranks: int) -> Table:
    groups: dict[tuple[str, int], list[float]] = {}
    for collective in collectives:
        groups.setdefault((collective.name, collective.bytes), []).append(collective.seconds)
    rows: list[list[TableCell]] = []
    for (name, size), seconds in sorted(groups.items(), key=lambda item: -sum(item[1])):
        mean = sum(seconds) / len(seconds)
        rate = size / mean / 1e9 if size >= _LARGE_BYTES and mean else None
        shown: TableCell = bytes_text(size) if size else None
        rows.append([name, shown, round(len(seconds) / ranks, 1), mean * 1e3, sum(seconds) / ranks * 1e3, rate])
    header = ["collective", "size", "calls of a rank", "mean, ms", "total of a rank, ms", "GB/s"]
    return Table(
        header,
        rows,
        "Collectives by size",
        "The mean time is from a rank's call to the end of the collective,"
        " so it holds the time in which the rank waits for the others to call it.",
    )
