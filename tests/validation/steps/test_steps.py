"""Steps that were recorded on an H200 are predicted with the calibration of the reference GPU."""

from collections.abc import Iterable
from statistics import median

import pytest

from meshwright.calibrate.operators import operator_cases
from meshwright.cluster.cluster import Cluster
from meshwright.profile.values import ModelProfile
from validation.steps.steps import StepRow, cases, measured_rows, predict, recorded_on, rows_here, trace


def _predicted_s(row: StepRow, cluster: Cluster, traced: ModelProfile | None = None) -> float:
    return predict(row, cluster, traced).step_s


def test_every_recorded_step_has_a_case() -> None:
    rows = list(measured_rows())
    assert {row.case["name"] for row, _ in rows} == set(cases())
    assert all(step_s > 0 for _, step_s in rows)


def test_a_launch_bound_step_is_predicted() -> None:
    mnist = [(row, step_s) for row, step_s in measured_rows() if row.case["name"] == "mnist"]
    assert {row.precision for row, _ in mnist} == {"bf16", "fp32"}
    for row, step_s in mnist:
        assert _predicted_s(row, recorded_on()) == pytest.approx(step_s, rel=0.2)


def test_a_gpu_measures_every_recorded_step() -> None:
    def keys(rows: Iterable[StepRow]) -> set[tuple[str, str, str]]:
        return {(row.case["name"], row.precision, row.layout) for row in rows}

    not_recorded = {("gpt2-xl", "fp32", "contiguous"), ("mnist", "tf32", "contiguous")}
    assert keys(rows_here(recorded_on())) == keys(row for row, _ in measured_rows()) | not_recorded


@pytest.mark.soak
def test_steps_of_an_h200_are_predicted_within_ten_percent() -> None:
    errors: dict[str, list[float]] = {"bf16": [], "fp32": [], "tf32": []}
    profiles: dict[tuple[str, str], ModelProfile] = {}
    shapes = {(case.operator, case.shape) for case in operator_cases("cuda")}
    for row, step_s in measured_rows():
        key = (row.case["name"], row.precision)
        if key not in profiles:
            profiles[key] = trace(row, on_gpu=True)
        errors[row.precision].append(abs(_predicted_s(row, recorded_on(), profiles[key]) / step_s - 1))
    for (name, _), traced in profiles.items():
        assert not shapes & _shapes(traced, cases()[name]["batch"])
    assert median(errors["bf16"]) <= 0.1
    assert max(errors["bf16"]) <= 0.2
    assert median(errors["fp32"]) <= 0.1
    assert median(errors["tf32"]) <= 0.1


def _shapes(traced: ModelProfile, batch: int) -> set[tuple[str, tuple[int, ...]]]:
    """The operators and shapes of the profile's products, as a calibration names them."""
    shapes: set[tuple[str, tuple[int, ...]]] = set()
    for segment in traced.segments:
        for operator in segment.operators:
            shape = tuple(round(size.at(batch)) for size in operator.shape)
            if operator.kind == "matmul":
                shapes.update((name, shape[1:]) for name in ("matmul", "input_gradient", "weight_gradient"))
            elif operator.kind == "convolution":
                shapes.add(("convolution", shape))
            elif operator.kind == "attention":
                shapes.add(("attention", (*shape[:3], shape[4])))
    return shapes
