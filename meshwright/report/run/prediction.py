"""The section of a run's page that compares the prediction with the measurement."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright.numbers.units import bytes_text, seconds_text
from meshwright.report.charts import axis, bars, figure
from meshwright.report.page import Cell, Chart, Section, Table
from meshwright.report.run.kinds import COLOURS, KINDS, StepKinds, mean_kinds, predicted_kinds
from meshwright.report.run.record import RunRecord

_CLOSE = 0.1  # an error below this share is shown as good


def prediction_sections(run: RunRecord, windows: Sequence[Sequence[StepKinds]]) -> Iterator[Section]:
    """Yields the section if the run has a prediction, or only the predicted time of a step."""
    result, prediction = run.result or {}, run.page.get("prediction")
    if not isinstance(prediction, Mapping):
        prediction = {"step_s": result.get("predicted_step_s")}
    predicted_s = prediction.get("step_s")
    if not isinstance(predicted_s, int | float):
        return
    mean = mean_kinds(row for window in windows for row in window)
    measured_s = result.get("measured_step_s") or (sum(mean.values()) if mean else None)
    rows = [["time of a step", seconds_text(predicted_s), seconds_text(measured_s), _error(predicted_s, measured_s)]]
    memory, is_cpu = prediction.get("memory_bytes"), run.device.startswith("cpu") or not run.device
    if isinstance(memory, int | float):
        peak = None if is_cpu else result.get("peak_memory_bytes")
        rows.append(
            ["peak memory of a rank", bytes_text(memory), bytes_text(peak) if peak else "–", _error(memory, peak)]
        )
    parts: list[Table | Chart] = [Table(["what", "predicted", "measured", "error of the prediction"], rows)]
    breakdown = prediction.get("breakdown")
    if isinstance(breakdown, Mapping) and mean:
        parts.append(_chart(predicted_kinds(breakdown), mean))
    process = " The memory of a CPU rank is that of its whole process, so it is not compared." if is_cpu else ""
    based_on = prediction.get("based_on")
    source = f" The prediction is based on constants of the hardware that are {based_on}." if based_on else ""
    yield Section(
        "Predicted and measured",
        "What was predicted before the run, beside what was measured. The error is how much larger (+) or smaller (−)"
        f" the prediction is than the measurement.{source}{process}",
        parts,
    )


def _error(predicted: float, measured: Any) -> Cell | str:
    if not isinstance(measured, int | float) or not measured:
        return "–"
    error = predicted / measured - 1
    return Cell(f"{error:+.1%}", error, "good" if abs(error) <= _CLOSE else "bad")


def _chart(predicted: Mapping[str, float], measured: Mapping[str, float]) -> Chart:
    traces = [
        bars(
            kind,
            [measured[kind] * 1e3, predicted[kind] * 1e3],
            ["measured", "predicted"],
            "%{y}: %{x:.4g} ms of a step",
            COLOURS[kind],
            horizontal=True,
        )
        for kind in KINDS
    ]
    layout = figure(traces, axis("time of a step", "ms"), axis(""), barmode="stack", bargap=0.35)
    return Chart("A step by kind, predicted and measured", layout, 230)
