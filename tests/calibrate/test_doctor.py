"""What the doctor says of a machine."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.calibrate import doctor
from meshwright.calibrate.doctor import Surroundings, examine, examine_thoroughly, lines, problems
from meshwright.cli import app
from meshwright.cluster.cache import calibrated_file
from meshwright.cluster.cluster import Cluster, OperatorTime
from meshwright.cluster.detect import find
from meshwright.errors import InputError
from tests.cluster.test_detect import measured

WELL = Surroundings(
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
    found = measured(cluster)
    (node,) = found.nodes
    device = node.device.model_copy(update={"operators": (ROW,)})
    return found.model_copy(update={"nodes": (node.model_copy(update={"device": device}),)})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"compiler": False}, "no C++ compiler"),
        ({"nvidia_smi": True}, "is built without CUDA"),
        ({"nvidia_smi": True, "torch_cuda": "13.0"}, "sees no GPU"),
        ({"gpu_names": ("A", "B"), "visible_gpus": 2}, "GPUs differ (A, B)"),
        ({"load": 12.3}, "12.3 processes want to run on 8 cores"),
        ({"shared_memory_bytes": 64 * 2**20}, "/dev/shm has 64 MiB free"),
    ],
)
def test_problems_are_one_line_each(changes: dict[str, Any], said: str) -> None:
    (problem,) = problems(replace(WELL, **changes))
    assert said in problem
    assert "\n" not in problem


def test_a_machine_that_is_well_has_none() -> None:
    assert list(problems(WELL)) == []
    gpus = replace(WELL, nvidia_smi=True, torch_cuda="13.0", visible_gpus=2, gpu_names=("A", "A"))
    assert list(problems(gpus)) == []


def test_it_tells_of_devices_and_links() -> None:
    told = examine(measured)
    assert set(told) == {"devices", "links", "problems"}
    assert told["devices"][0]["rates"] == {"fp32": 5e10}
    assert told["devices"][0]["based_on"] == "measured"
    assert told["links"][0]["bandwidth_bytes_per_s"] == 1e9
    assert json.loads(json.dumps(told)) == told
    assert any("fp32 50.0 GFLOP/s" in line for line in lines(told))


def test_calibration_writes_the_devices_file() -> None:
    told = examine_thoroughly(None, calibrated)
    name = told["devices"][0]["name"]
    assert told["file"] == str(calibrated_file(name))
    assert (told["devices"][0]["based_on"], told["devices"][0]["operators_measured"]) == ("calibrated", 1)
    assert (find("local").based_on, find("local").nodes[0].device.operators) == ("calibrated", (ROW,))


def test_calibration_into_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "device.yaml"
    examine_thoroughly(file, calibrated)
    (tmp_path / "mine.yaml").write_text("nodes: [{device: device.yaml, link: Loopback, cores: 1}]")
    cluster = find(str(tmp_path / "mine.yaml"))
    assert (cluster.based_on, cluster.nodes[0].device.operators) == ("calibrated", (ROW,))
    assert find("local").based_on == "measured"


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: examine(measured))
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0
    assert {"devices", "links", "problems"} <= set(json.loads(done.stdout.splitlines()[-1]))
    assert "fp32" in CliRunner().invoke(app, ["doctor"]).stdout
    refused = CliRunner().invoke(app, ["doctor", "--output", "x.yaml"])
    assert isinstance(refused.exception, InputError)
