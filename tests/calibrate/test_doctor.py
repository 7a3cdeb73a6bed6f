"""What `meshwright doctor` reports about a machine."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.calibrate import doctor
from meshwright.calibrate.doctor import SystemState, calibrate_and_diagnose, diagnose, problems, report_lines
from meshwright.cli import app
from meshwright.cluster.cache import calibrated_file
from meshwright.cluster.cluster import Cluster, OperatorTime
from meshwright.cluster.detect import find_cluster
from meshwright.errors import InputError
from tests.cluster.test_detect import measured

HEALTHY = SystemState(
    compiler=True,
    nvidia_smi=False,
    gpu_names=(),
    torch_cuda=None,
    visible_gpus=0,
    cores=8,
    load=1.0,
    shared_memory_bytes=2**34,
)
ROW = OperatorTime(operator="norm", dtype="fp32", shape=(2, 3), flops=48, bytes=48, seconds=1e-6)


def calibrated(cluster: Cluster) -> Cluster:
    measured_cluster = measured(cluster)
    (node,) = measured_cluster.nodes
    device = node.device.model_copy(update={"operators": (ROW,)})
    return measured_cluster.model_copy(update={"nodes": (node.model_copy(update={"device": device}),)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compiler": False}, "no C++ compiler"),
        ({"nvidia_smi": True}, "is built without CUDA"),
        ({"nvidia_smi": True, "torch_cuda": "13.0"}, "sees no GPU"),
        ({"gpu_names": ("A", "B"), "visible_gpus": 2}, "GPUs differ (A, B)"),
        ({"load": 12.3}, "12.3 processes compete for 8 cores"),
        ({"shared_memory_bytes": 64 * 2**20}, "/dev/shm has 64 MiB free"),
    ],
)
def test_problems_are_one_line_each(changes: dict[str, Any], message: str) -> None:
    (problem,) = problems(replace(HEALTHY, **changes))
    assert message in problem
    assert "\n" not in problem


def test_a_healthy_machine_has_no_problems() -> None:
    assert list(problems(HEALTHY)) == []
    gpus = replace(HEALTHY, nvidia_smi=True, torch_cuda="13.0", visible_gpus=2, gpu_names=("A", "A"))
    assert list(problems(gpus)) == []


def test_the_report_has_devices_and_links() -> None:
    report = diagnose(measured)
    assert set(report) == {"devices", "links", "problems"}
    assert report["devices"][0]["rates"] == {"fp32": 5e10}
    assert report["devices"][0]["based_on"] == "measured"
    assert report["links"][0]["bandwidth_bytes_per_s"] == 1e9
    assert json.loads(json.dumps(report)) == report
    assert any("fp32 50.0 GFLOP/s" in line for line in report_lines(report))


def test_calibration_writes_the_devices_file() -> None:
    report = calibrate_and_diagnose(None, calibrated)
    name = report["devices"][0]["name"]
    assert report["file"] == str(calibrated_file(name))
    assert (report["devices"][0]["based_on"], report["devices"][0]["operators_measured"]) == ("calibrated", 1)
    assert (find_cluster("local").based_on, find_cluster("local").nodes[0].device.operators) == ("calibrated", (ROW,))


def test_calibration_into_a_file_that_the_user_names(tmp_path: Path) -> None:
    file = tmp_path / "device.yaml"
    calibrate_and_diagnose(file, calibrated)
    (tmp_path / "mine.yaml").write_text("nodes: [{device: device.yaml, link: Loopback, cores: 1}]")
    cluster = find_cluster(str(tmp_path / "mine.yaml"))
    assert (cluster.based_on, cluster.nodes[0].device.operators) == ("calibrated", (ROW,))
    assert find_cluster("local").based_on == "measured"


def test_the_doctor_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda: diagnose(measured))
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    assert {"devices", "links", "problems"} <= set(json.loads(result.stdout.splitlines()[-1]))
    assert "fp32" in CliRunner().invoke(app, ["doctor"]).stdout
    refused = CliRunner().invoke(app, ["doctor", "--output", "x.yaml"])
    assert isinstance(refused.exception, InputError)
