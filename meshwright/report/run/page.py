"""The page of a run: what was trained and how fast, what the time of each rank went to, and what was predicted."""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from meshwright.errors import InputError
from meshwright.files.foreign import UNREADABLE, describe_unreadable
from meshwright.numbers.units import bytes_text, seconds_text
from meshwright.report.charts import axis, colour, figure, line
from meshwright.report.cluster_drawing import cluster_drawing
from meshwright.report.model_tree import model_tree
from meshwright.report.page import Chart, Drawing, KeyFigures, Lines, Page, Section, Table, Tree
from meshwright.report.run.experts import expert_sections
from meshwright.report.run.kinds import kinds_of_windows
from meshwright.report.run.losses import NOT_FINITE, NOT_METRICS, loss_sections
from meshwright.report.run.prediction import prediction_sections
from meshwright.report.run.profile import profile_sections
from meshwright.report.run.ranks import rank_sections
from meshwright.report.run.record import Event, RunRecord, read_run
from meshwright.report.run.shares import share_sections

_MOST_MARKS = 60
_MOST_EVENTS = 3_000
_LATEST_LINES = 25
_SAVE_NAMES = {"save": "checkpoint saved", "evaluate": "evaluation", "load checkpoint": "checkpoint loaded"}


def run_page(path: Path, live: bool = False) -> Page:
    """Returns the page of the run in a folder. A live page begins with the ranks and the latest lines. Raises an
    `InputError` if it is no run folder, or its files hold values that no run writes."""
    run = read_run(path)
    try:
        return _page(run, live)
    except UNREADABLE as error:
        raise InputError(f"{path}: the run's files are damaged ({describe_unreadable(error)})") from error


def _page(run: RunRecord, live: bool) -> Page:
    windows = kinds_of_windows(run.ranks)
    sections = [
        _summary(run),
        *([_now(run)] if live else []),
        *loss_sections(run),
        *_throughput(run),
        *rank_sections(run, windows),
        *expert_sections(run),
        *share_sections(run),
        *prediction_sections(run, windows),
        *profile_sections(run),
        *_drawings(run),
        _history(run),
        _job(run),
    ]
    return Page(f"Run {run.name}", _subtitle(run), sections, run.state)


def _subtitle(run: RunRecord) -> str:
    ranks = run.plan.processes if run.plan is not None else len(run.heartbeats)
    kind = run.device or "unknown device"
    plan = f", plan {run.plan.summary()}" if run.plan is not None else ""
    began = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.began)) if run.began else "not yet"
    return f"Job {run.job.get('name', '')} on {ranks} ranks ({kind}){plan}; began {began}."


def _summary(run: RunRecord) -> Section:
    result = run.result or {}
    train = run.entries("train")
    rows = [("steps", f"{run.step:,}")]
    loss = result.get("loss", train[-1].get("loss") if train else None)
    rows.append(("training loss, last step", NOT_FINITE if train and loss is None else _number(loss)))
    evaluations = run.entries("eval")
    metrics = result.get("metrics") or (_metrics_of(evaluations[-1]) if evaluations else {})
    rows += [(f"{name}, last evaluation", _number(value)) for name, value in sorted(metrics.items())]
    rates = [entry["samples_per_s"] for entry in train if entry.get("samples_per_s")]
    rate = result.get("samples_per_s") or (sum(rates) / len(rates) if rates else None)
    rows.append(("samples per second", "not measured" if rate is None else f"{rate:,.0f}"))
    if step_s := result.get("measured_step_s"):
        rows.append(("time of a step, median", seconds_text(step_s)))
    peak = result.get("peak_memory_bytes") or max(
        (window.peak_bytes for times in run.ranks.values() for window in times.windows[-1:]), default=None
    )
    rows.append(("peak memory of a rank", bytes_text(peak)))
    rows.append(("restarts", str(result.get("restarts", _restarts(run)))))
    if result.get("skipped_steps"):
        rows.append(("steps skipped because of NaN", str(result["skipped_steps"])))
    return Section("Summary", "", [KeyFigures(rows)])


def _number(value: Any) -> str:
    if not isinstance(value, int | float):
        return "not measured"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"


def _metrics_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in NOT_METRICS}


def _restarts(run: RunRecord) -> int:
    return max((event.attempt for times in run.ranks.values() for event in times.events), default=0)


def _now(run: RunRecord) -> Section:
    rows: list[list[Any]] = []
    for rank, beat in sorted(run.heartbeats.items()):
        rows.append([rank, beat.pid, max(0, beat.step), beat.activity, beat.attempt, beat.completed])
    age = time.time() - run.heartbeat_s
    since = f"The newest heartbeat is {seconds_text(max(age, 0.001))} old." if run.heartbeat_s else "No rank has begun."
    header = ["rank", "process", "step", "doing", "attempt", "steps since the start"]
    return Section(
        "Now",
        f"Which step each rank is at, and what it is doing. {since}",
        [Table(header, rows), Lines(_latest_lines(run), "Latest")],
    )


def _latest_lines(run: RunRecord) -> list[str]:
    """The latest lines of the metrics and of the log, and the latest events of the lowest rank; the newest first."""
    lines = [(float(entry["time"]), _metrics_line(entry)) for entry in run.metrics[-_LATEST_LINES:]]
    if run.ranks:
        events = run.ranks[min(run.ranks)].events[-_LATEST_LINES:]
        lines += [(event.time, _event_line(event)) for event in events]
    shown = [f"{_clock(moment)}  {text}" for moment, text in sorted(lines)[-_LATEST_LINES:]]
    log = [text for text in run.log_lines if text.strip()]
    return [*shown[::-1], *(["the end of the log of the lowest rank:", *log] if log else [])]


def _clock(moment: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(moment))


def _metrics_line(entry: Mapping[str, Any]) -> str:
    values = ", ".join(
        f"{name} {NOT_FINITE if value is None else _number(value)}"
        for name, value in _metrics_of(entry).items()
        if value is not None or name == "loss"
    )
    return f"step {entry['step']} ({entry['kind']}): {values}"


def _event_line(event: Event) -> str:
    if event.kind == "start":
        return f"step {event.step}: attempt {event.attempt} began on {event.host}"
    return f"step {event.step}: {_SAVE_NAMES.get(event.kind, event.kind)} in {seconds_text(event.seconds)}"


# ---- throughput


def _throughput(run: RunRecord) -> Iterator[Section]:
    entries = [entry for entry in run.entries("train") if entry.get("samples_per_s")]
    if not entries:
        return
    began, unit_s, unit = run.began, *_time_unit(run)
    hours = [(entry["time"] - began) / unit_s for entry in entries]
    rates = [entry["samples_per_s"] for entry in entries]
    traces = [line("samples per second", hours, rates, "%{y:,.0f} samples/s after %{x:.4g} " + unit, colour(0))]
    events = run.ranks[min(run.ranks)].events if run.ranks else ()
    marks = (("save", "checkpoint saved", colour(2), "triangle-up"), ("evaluate", "evaluation", colour(3), "diamond"))
    for kind, name, mark_colour, symbol in marks:
        chosen = [event for event in events if event.kind == kind]
        chosen = chosen[:: max(1, len(chosen) // _MOST_MARKS)]
        if chosen:
            traces.append(_marks(name, chosen, [(e.time - began) / unit_s for e in chosen], mark_colour, symbol))
    restarts = [event for event in events if event.kind == "start" and event.attempt > 0]
    restarts = restarts[-_MOST_MARKS:]
    if restarts:
        traces.append(_marks("restart", restarts, [(e.time - began) / unit_s for e in restarts], colour(5), "x"))
    lines = [
        {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": {"color": colour(5), "width": 1}}
        for x in ((event.time - began) / unit_s for event in restarts)
    ]
    layout = figure(
        traces, axis("time since the start", unit), axis("samples per second", rangemode="tozero"), shapes=lines
    )
    yield Section(
        "Throughput",
        "Samples of all ranks per second, measured over the logged steps, without evaluations and checkpoints. Marks at"
        " the bottom show checkpoints and evaluations; a cross and a line show that the ranks were started again.",
        [Chart("Throughput", layout)],
    )


def _marks(name: str, events: Sequence[Event], x: Sequence[float], mark_colour: str, symbol: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": list(x),
        "y": [0] * len(x),
        "customdata": [[event.step, seconds_text(event.seconds)] for event in events],
        "hovertemplate": "%{fullData.name} at step %{customdata[0]:,}, %{customdata[1]}<extra></extra>",
        "marker": {"color": mark_colour, "symbol": symbol, "size": 9},
        "cliponaxis": False,
    }


def _time_unit(run: RunRecord) -> tuple[float, str]:
    """The unit for times since the start, in seconds and by name."""
    ends = [float(entry["time"]) for entry in run.metrics[-1:]]
    ends += [window.time for times in run.ranks.values() for window in times.windows[-1:]]
    length = max(ends, default=0.0) - run.began
    return (3600.0, "hours") if length > 3 * 3600 else (60.0, "minutes") if length > 180 else (1.0, "seconds")


# ---- drawings, history, job


def _drawings(run: RunRecord) -> Iterator[Section]:
    yield Section(
        "Plan",
        "The modules of the model, and what the plan does to each of them. What the plan says in full is at the end of"
        " the page.",
        [*_drawing(model_tree, run.page.get("modules"))],
    )
    yield Section(
        "Cluster",
        "The machines, their devices, and the links between them.",
        [*_drawing(cluster_drawing, run.page.get("cluster"))],
    )


def _drawing(draw: Any, values: Any) -> Iterator[Drawing | Tree | Lines]:
    """Yields the drawing of values in page.json, or a line that says why there is none."""
    if values is None:
        yield Lines(["This run has not recorded it: runs of earlier versions, and some launchers, do not."])
        return
    try:
        yield draw(values)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        yield Lines([f"page.json of this run cannot be read here: {type(error).__name__} {error}"])


def _history(run: RunRecord) -> Section:
    rows: list[list[Any]] = []
    for rank, times in sorted(run.ranks.items()):
        starts = [event for event in times.events if event.kind == "start"]
        for event in starts:
            rows.append([event.time, event.step, rank, f"attempt {event.attempt} on {event.host}", None])
    if run.ranks:
        first = run.ranks[min(run.ranks)].events
        events = [event for event in first if event.kind in _SAVE_NAMES]
        for event in events[:: max(1, len(events) // _MOST_EVENTS)]:
            rows.append([event.time, event.step, min(run.ranks), _SAVE_NAMES[event.kind], event.seconds])
    for first_skipped, last_skipped in _runs_of_steps(run.entries("skipped"))[-_MOST_EVENTS:]:
        steps = last_skipped["step"] - first_skipped["step"] + 1
        words = f"{steps:,} steps skipped" if steps > 1 else "step skipped"
        rows.append([first_skipped["time"], first_skipped["step"], 0, f"{words}: loss {NOT_FINITE}", None])
    rows.sort(key=lambda row: (row[0], row[1]))
    rows = [[_clock(moment), *others] for moment, *others in rows]
    header = ["time (UTC)", "after step", "rank", "what", "seconds"]
    return Section(
        "History",
        "When ranks were started, when checkpoints were saved and evaluations made, and which steps were skipped.",
        [Table(header, rows)] if rows else [],
    )


def _runs_of_steps(entries: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """For each run of entries with consecutive steps, its first and its last entry."""
    groups: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
    for entry in entries:
        if groups and entry["step"] == groups[-1][1]["step"] + 1:
            groups[-1] = (groups[-1][0], entry)
        else:
            groups.append((entry, entry))
    return groups


def _job(run: RunRecord) -> Section:
    job = yaml.safe_dump(dict(run.job), sort_keys=False, allow_unicode=True).splitlines()
    plan = run.plan.to_yaml().splitlines() if run.plan is not None else ["plan.yaml cannot be read"]
    return Section("Job and plan", "The files that were run.", [Lines(job, "job.yaml"), Lines(plan, "plan.yaml")])
