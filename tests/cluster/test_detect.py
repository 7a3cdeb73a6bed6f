"""Names of clusters."""

import os
from pathlib import Path

import pytest
import torch

from meshwright.cluster.detect import find, usable_cores
from meshwright.errors import InputError


def test_local_has_a_device_a_core_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    cluster = find("local")
    assert (cluster.device, cluster.devices) == ("cpu", cluster.cores)
    assert 1 <= cluster.cores <= len(os.sched_getaffinity(0))


def test_local_takes_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert (find("local").device, find("local").devices) == ("cuda", 4)


@pytest.mark.parametrize("name", ["3xcpu", "3xCPU"])
def test_more_devices_than_cores(name: str) -> None:
    cluster = find(name)
    assert (cluster.device, cluster.devices, cluster.cores) == ("cpu", 3, find("local").cores)


@pytest.mark.parametrize("name", ["8xH100", "0xcpu", "lokal", ""])
def test_unknown_clusters_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(InputError, match=r"^cluster '.*' is not known: write 'local' .*$") as caught:
        find(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({"cpu.max": "150000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, 1000),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1000),
        ({}, 1000),
    ],
)
def test_the_quota_of_the_container_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], most: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(1000)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == most
