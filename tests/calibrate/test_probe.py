"""Measuring this machine gives positive constants and a device that predictions can use."""

import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

from meshwright.calibrate import probe
from meshwright.calibrate.operators import measure_operators, operator_cases
from meshwright.calibrate.probe import measure_machine
from meshwright.cluster.cluster import MeasuredOperator, OperatorTime
from meshwright.cluster.curves import curve_time
from meshwright.cluster.detect import detect_cpu, find_cluster
from meshwright.errors import MeshwrightError
from tests.soaked import all_but

# Runs a module as `python -m` does, with the smallest case of each class of operators only.
WITH_SMALLEST_CASES = """
import runpy, sys
from meshwright.calibrate import operators
cases = sorted(operators.operator_cases("cpu"), key=lambda case: -case.elements)
smallest = {case.operator: case for case in cases}
operators.operator_cases = lambda kind: smallest.values()
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("cases", all_but({"smallest"}, ["smallest", "all"]))
def test_this_machine_is_measured(cases: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if cases == "smallest":
        script, python = tmp_path / "probe.py", tmp_path / "python"
        script.write_text(WITH_SMALLEST_CASES)
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
        python.chmod(0o755)
        monkeypatch.setattr(probe.sys, "executable", str(python))
    detected = detect_cpu()
    cluster = measure_machine(detected)
    (node,) = cluster.nodes
    assert cluster.based_on == "measured"
    assert (cluster.device_count, node.cores) == (detected.device_count, detected.cores)
    assert node.device.is_known
    assert {"fp64", "fp32"} <= set(node.device.rates)
    assert min(node.device.rates.values()) > 0
    assert 0 < node.device.launch_s < 1
    assert {row.operator for row in node.device.operators} >= {"matmul", "convolution", "optimizer"}
    assert node.device.context_bytes > 0
    assert node.device.sources["rates"].startswith("measured: torch")
    assert node.link.latency_s > 0
    (curve,) = node.link.curves["all_reduce"]
    assert curve.ranks == 2
    assert (curve_time(node.link, "all_reduce", 2**20, 2) or 0) > 0
    assert type(cluster).model_validate(cluster.model_dump()) == cluster


@pytest.mark.parametrize(("in_catalog", "expected"), [(0, 58), (132, 132)])
def test_the_driver_supplies_what_the_catalog_lacks(in_catalog: int, expected: int) -> None:
    node = find_cluster("H200").nodes[0]
    node = node.model_copy(update={"device": node.device.model_copy(update={"multiprocessors": in_catalog})})
    measurements = {"multiprocessors": 58, "instructions": [], "operators": [], "launch_s": 1e-5}
    device = probe._device(node, measurements)
    assert device.multiprocessors == expected
    assert device.sources["multiprocessors"].startswith("the driver") == (not in_catalog)
    assert device.launch_s == 1e-5


def test_a_failing_rank_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.sys, "executable", "/bin/false")
    with pytest.raises(MeshwrightError, match=r"^this machine could not be measured: the probe exited with code 1"):
        measure_machine(detect_cpu())


def test_every_class_of_operators_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    smallest = {case.operator: case for case in sorted(operator_cases("cpu"), key=lambda case: -case.elements)}
    monkeypatch.setattr("meshwright.calibrate.operators.operator_cases", lambda kind: smallest.values())
    monkeypatch.setattr("meshwright.calibrate.operators.BUDGET_S", {"cpu": 1e-3})
    rows = [OperatorTime.model_validate(row) for row in measure_operators(torch.device("cpu"), {"fp32": 1e10})]
    on_gpus_only = {"bias", "dropout", "widen", "input_gradient", "weight_gradient"}
    assert set(smallest) == set(get_args(MeasuredOperator)) - on_gpus_only
    assert {row.operator for row in rows} == set(smallest)
    backward = {row.operator for row in rows if row.direction == "backward"}
    losses = {"softmax", "log_softmax", "loss"}
    assert backward == {"attention", "convolution", "grouped_matmul", "norm", "pooling", "gelu", "embedding"} | losses
    assert {row.dtype for row in rows} == {"fp32"}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_no_shape_is_measured_twice(kind: str) -> None:
    shapes = [(case.operator, case.shape, case.layout) for case in operator_cases(kind)]
    assert len(shapes) == len(set(shapes))
    assert all(case.elements > 0 for case in operator_cases(kind))
