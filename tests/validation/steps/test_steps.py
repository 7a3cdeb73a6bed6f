"""Predictions of the reference GPU's calibration against steps that were measured on such a GPU."""

from statistics import median

import pytest

from meshwright.calibrate.operators import operator_cases as calibrated
from meshwright.cluster.cluster import Cluster
from meshwright.profile.values import ModelProfile
from validation.steps.steps import StepRow, cases, measured_rows, predict, recorded_on, rows_here, trace


def _seconds(row: StepRow, cluster: Cluster, traced: ModelProfile | None = None) -> float:
    return predict(row, cluster, traced).step_s


def test_every_measured_step_has_a_case() -> None:
    rows = list(measured_rows())
    assert {row.case["name"] for row, _ in rows} == set(cases())
    assert all(taken > 0 for _, taken in rows)


def test_a_launch_bound_step_is_predicted() -> None:
    mnist = [(row, taken) for row, taken in measured_rows() if row.case["name"] == "mnist"]
    assert len(mnist) == 3
    for row, taken in mnist:
        assert _seconds(row, recorded_on()) == pytest.approx(taken, rel=0.2)


def test_what_is_measured_here_depends_on_the_device() -> None:
    left_out = 2  # gpt2-xl in fp32 and mnist in tf32
    assert len(list(rows_here(recorded_on()))) == len(list(measured_rows())) + left_out


@pytest.mark.soak
def test_steps_of_an_h200_are_predicted_within_ten_percent() -> None:
    errors: dict[str, list[float]] = {"bf16": [], "fp32": [], "tf32": []}
    profiles: dict[tuple[str, str], ModelProfile] = {}
    shapes = {(case.operator, case.shape) for case in calibrated("cuda")}
    for row, taken in measured_rows():
        key = (row.case["name"], row.precision)
        if key not in profiles:
            profiles[key] = trace(row, on_gpu=True)
        errors[row.precision].append(abs(_seconds(row, recorded_on(), profiles[key]) / taken - 1))
    for (name, _), traced in profiles.items():
        assert not shapes & _shapes(traced, cases()[name]["batch"])
    assert median(errors["bf16"]) <= 0.1
    assert max(errors["bf16"]) <= 0.2
    assert median(errors["fp32"]) <= 0.1
    assert median(errors["tf32"]) <= 0.1


def _shapes(traced: ModelProfile, batch: int) -> set[tuple[str, tuple[int, ...]]]:
    """Of its products, as a calibration has them."""
    found: set[tuple[str, tuple[int, ...]]] = set()
    for stretch in traced.segments:
        for operator in stretch.operators:
            shape = tuple(round(size.at(batch)) for size in operator.shape)
            if operator.kind == "matmul":
                found.update((name, shape[1:]) for name in ("matmul", "input_gradient", "weight_gradient"))
            elif operator.kind == "convolution":
                found.add(("convolution", shape))
            elif operator.kind == "attention":
                found.add(("attention", (*shape[:3], shape[4])))
    return found
