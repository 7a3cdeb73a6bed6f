"""What `meshwright doctor` reports about a machine."""

import errno
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from meshwright.calibrate import doctor
from meshwright.calibrate.doctor import SystemState, calibrate_and_diagnose, diagnose, problems, report_lines
from meshwright.calibrate.system.disk import OutputDisk, inspect_disk
from meshwright.calibrate.system.network import Network, inspect_network
from meshwright.calibrate.system.versions import Versions, find_versions
from meshwright.cli import app
from meshwright.cluster.cache import calibrated_file
from meshwright.cluster.cluster import Cluster, OperatorTime
from meshwright.cluster.detect import find_cluster
from meshwright.errors import InputError
from meshwright.progress import NO_BREAK
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
    versions=Versions("0.1.0", "3.12.1", "2.13.0"),
    network=Network(("lo", "eth0"), "lo", "eth0", (), ""),
    disk=OutputDisk("runs", "/", "ext4", 10**11, 1e9),
)
GPU_VERSIONS = Versions("0.1.0", "3.12.1", "2.13.0+cu130", "13.0", "2.27.7", "580.1", "13.0")
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
        ({"versions": replace(HEALTHY.versions, python="3.10.2")}, "Python is 3.10.2: install 3.11 or newer"),
        ({"versions": replace(HEALTHY.versions, torch="2.9.1+cpu")}, "torch is 2.9.1+cpu: install 2.11 or newer"),
        (
            {"versions": replace(GPU_VERSIONS, driver="550.2", driver_cuda="12.4")},
            "torch is built for CUDA 13.0, but the driver 550.2 runs CUDA up to 12.4: update the driver",
        ),
        (
            {"network": replace(HEALTHY.network, connection_problem="Connection refused")},
            "ranks cannot connect to each other on lo (127.0.0.1): Connection refused; allow",
        ),
        (
            {"network": replace(HEALTHY.network, named=(("GLOO_SOCKET_IFNAME", "ib0"),))},
            "GLOO_SOCKET_IFNAME is ib0, but this machine has the interfaces lo, eth0: set it to one of these",
        ),
        ({"disk": replace(HEALTHY.disk, free_bytes=10**9)}, "mounted at / (ext4), which has 954 MiB free: free some"),
        ({"disk": replace(HEALTHY.disk, bytes_per_s=1e7)}, "which writes 10 MB/s: checkpoints take long"),
        ({"disk": replace(HEALTHY.disk, kind="tmpfs", free_bytes=10**9)}, "lost when the machine restarts"),
        (
            {"disk": replace(HEALTHY.disk, bytes_per_s=None, problem="Permission denied")},
            "which cannot be written: Permission denied; set the job's output",
        ),
    ],
)
def test_problems_are_one_line_each(changes: dict[str, Any], message: str) -> None:
    (problem,) = problems(replace(HEALTHY, **changes))
    assert message in problem
    assert "\n" not in problem


def test_a_healthy_machine_has_no_problems() -> None:
    assert list(problems(HEALTHY)) == []
    named = replace(HEALTHY.network, named=(("NCCL_SOCKET_IFNAME", "=eth0,ib"), ("GLOO_SOCKET_IFNAME", "^docker")))
    gpus = replace(HEALTHY, nvidia_smi=True, torch_cuda="13.0", visible_gpus=2, gpu_names=("A", "A"), network=named)
    gpus = replace(gpus, versions=replace(GPU_VERSIONS, driver_cuda="13.2"))
    assert list(problems(gpus)) == []


def test_the_report_has_devices_and_links(tmp_path: Path) -> None:
    report = diagnose(tmp_path / "runs", measured)
    assert set(report) == {"devices", "links", "versions", "network", "disk", "problems"}
    assert report["devices"][0]["rates"] == {"fp32": 5e10}
    assert report["devices"][0]["based_on"] == "measured"
    assert report["links"][0]["bandwidth_bytes_per_s"] == 1e9
    assert json.loads(json.dumps(report)) == report
    assert any("fp32 50 GFLOP/s" in line.replace(NO_BREAK, " ") for line in report_lines(report))


def test_this_machine_has_versions_a_network_and_a_disk(tmp_path: Path) -> None:
    versions, network, disk = find_versions(), inspect_network(), inspect_disk(tmp_path / "runs")
    assert versions.torch == str(torch.__version__)
    assert network.local in network.interfaces
    assert network.connection_problem == ""
    assert disk.free_bytes > 0
    assert disk.bytes_per_s is not None
    assert disk.bytes_per_s > 0
    assert list(tmp_path.iterdir()) == [], "nothing is left there"


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    disk = inspect_disk(tmp_path)
    assert (disk.bytes_per_s, disk.problem) == (None, "Permission denied")


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
    monkeypatch.setattr(doctor, "diagnose", lambda: diagnose(measuring=measured))
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    assert {"devices", "links", "problems"} <= set(json.loads(result.stdout.splitlines()[-1]))
    assert "fp32" in CliRunner().invoke(app, ["doctor"]).stdout
    refused = CliRunner().invoke(app, ["doctor", "--output", "x.yaml"])
    assert isinstance(refused.exception, InputError)
