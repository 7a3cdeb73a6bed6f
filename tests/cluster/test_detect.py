"""Which cluster a name describes, and that this machine is measured only once."""

import os
from pathlib import Path

import pytest
import torch

from meshwright.cluster import detect
from meshwright.cluster.cache import calibrated_file, save_device, save_measured
from meshwright.cluster.cluster import Cluster, Device, Link, OperatorTime
from meshwright.cluster.detect import check_is_local, find_cluster
from meshwright.cluster.gpus import Gpu
from meshwright.errors import InputError

LINK = Link(name="Loopback", bandwidth_bytes_per_s=1e9, latency_s=1e-4)


def measured(cluster: Cluster) -> Cluster:
    """Returns the cluster with invented measurements."""
    (node,) = cluster.nodes
    device = node.device.model_copy(
        update={"memory_bytes": 2**34, "bandwidth_bytes_per_s": 1e10, "rates": {"fp32": 5e10}, "launch_s": 1e-6}
    )
    node = node.model_copy(update={"device": device, "link": LINK})
    return cluster.model_copy(update={"nodes": (node,), "based_on": "measured"})


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(detect, "list_gpus", lambda: [Gpu(name, 10 * 2**30, 0)] * count)


def test_local_has_one_device_per_core_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    cluster = find_cluster("local")
    assert (cluster.kind, cluster.device_count, cluster.based_on) == ("cpu", cluster.cores, "detected")
    assert 1 <= cluster.cores <= len(os.sched_getaffinity(0))
    assert cluster.nodes[0].device.memory_bytes > 0


def test_local_has_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert (find_cluster("local").kind, find_cluster("local").device_count) == ("cuda", 4)


def test_a_gpu_in_the_catalog_has_its_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 2, "NVIDIA A100-SXM4-80GB")
    cluster = find_cluster("local")
    assert (cluster.nodes[0].device.name, cluster.based_on) == ("A100-80GB", "datasheet")
    assert cluster.nodes[0].device.rates["bf16"] == 312e12


def test_an_unknown_gpu_is_measured_and_never_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 2, "NVIDIA Z900")
    cluster = find_cluster("local")
    assert (cluster.nodes[0].device.name, cluster.nodes[0].device.rates) == ("NVIDIA Z900", {})
    assert cluster.based_on == "detected"
    assert find_cluster("local", measured).nodes[0].device.rates == {"fp32": 5e10}


@pytest.mark.parametrize("name", ["3xcpu", "3xCPU"])
def test_a_cluster_may_have_more_cpu_devices_than_cores(name: str) -> None:
    cluster = find_cluster(name)
    assert (cluster.kind, cluster.device_count, cluster.name) == ("cpu", 3, name)
    assert cluster.cores == find_cluster("1xcpu").cores


def test_devices_share_the_memory_and_bandwidth_of_the_cores() -> None:
    few, many = find_cluster("2xcpu", measured).nodes[0].device, find_cluster("8xcpu", measured).nodes[0].device
    assert many.memory_bytes == few.memory_bytes // 4
    assert many.bandwidth_bytes_per_s == few.bandwidth_bytes_per_s / 4
    assert many.rates == few.rates


def test_a_machine_is_measured_once(monkeypatch: pytest.MonkeyPatch, temporary_cache: Path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    calls = []

    def count(cluster: Cluster) -> Cluster:
        calls.append(cluster.name)
        return measured(cluster)

    first = find_cluster("local", count)
    assert (first.based_on, calls) == ("measured", ["local"])
    assert find_cluster("local", count) == first == find_cluster("local")
    assert find_cluster("3xcpu", count).based_on == "measured"
    assert calls == ["local"]
    next(temporary_cache.glob("machine-*.yaml")).write_text("nodes: [")
    assert find_cluster("local").based_on == "detected"
    assert find_cluster("local", count) == first
    assert calls == ["local", "local"]


def test_another_version_of_torch_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    find_cluster("local", measured)
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert find_cluster("local").based_on == "detected"


def test_a_calibrated_device_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    row = OperatorTime(operator="matmul", dtype="fp32", shape=(2, 3, 4), flops=48, bytes=104, seconds=1e-6)
    for device in (find_cluster("local", measured).nodes[0].device, find_cluster("1xH200").nodes[0].device):
        calibrated = device.model_copy(update={"operators": (row,), "launch_s": 9e-6})
        save_device(calibrated, calibrated_file(device.name))
    local, eight = find_cluster("local"), find_cluster("8xH200")
    assert (local.based_on, local.nodes[0].device.operators) == ("calibrated", (row,))
    assert (eight.based_on, eight.nodes[0].device.launch_s) == ("calibrated", 9e-6)
    assert find_cluster("8xH100").based_on == "datasheet"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("8xH10O", "there is no device 'H10O': did you mean 'H100'?"),
        ("8xa100-80g", "there is no device 'a100-80g': did you mean 'A100-80GB'?"),
        ("0xcpu", "there is no device '0xcpu': did you mean 'cpu'?"),
        ("lokal", "there is no device 'lokal': did you mean 'local'?"),
        ("8xQuantum", "there is no device 'Quantum': docs/cluster.md lists them, and a YAML file describes any other"),
        ("", "write 'local' for this machine, a name such as 8xH100 or 4x8xA100-80GB@200G, or a YAML file"),
        ("2x2x8xH100", "write 'local' for this machine, a name such as 8xH100"),
        ("2x3xcpu", "cpu is a core of this machine, write '3xcpu' for three"),
        ("2x8xH100@InfiniBand-NRD", "there is no link 'InfiniBand-NRD' in the catalog: did you mean 'InfiniBand-NDR'?"),
        ("2x8xH100@0G", "there is no link '0G' in the catalog"),
        ("8xH100@", "write 'local' for this machine"),
    ],
)
def test_unknown_clusters_are_refused_in_one_line(name: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        find_cluster(name)
    assert str(caught.value).startswith(f"cluster '{name}' is not known: {message}")
    assert "\n" not in str(caught.value)


def test_ranks_are_started_on_this_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    check_is_local(find_cluster("local"))
    check_is_local(find_cluster("64xcpu"))
    for name, hardware in (("8xH100", "has 8 GPUs"), ("2x1xCore", "has 2 nodes"), ("999xCore", "has other CPUs")):
        with pytest.raises(
            InputError, match=rf"^cluster '{name}' {hardware}, this machine has 0 GPUs and .* --cluster local"
        ):
            check_is_local(find_cluster(name))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    check_is_local(find_cluster("8xH100"))


def test_instructions_accelerate_the_dtype_they_end_in() -> None:
    device = Device(name="a", kind="cpu", instructions=("amx-bf16", "avx512-fp32"))
    assert (device.accelerates("bf16"), device.accelerates("fp16")) == (True, False)


def test_measurements_that_cannot_be_stored_cost_only_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    detected = detect.detect_cpu()
    with pytest.warns(UserWarning, match="until then this machine is measured in every run"):
        save_measured(detected, detected)


def test_local_is_the_whole_machine() -> None:
    assert find_cluster(" Local") == find_cluster("local")
    with pytest.raises(InputError, match="'2xlocal' is not known: local is this machine with all its devices"):
        find_cluster("2xlocal")
