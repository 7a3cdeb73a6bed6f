"""Names of machines that are not alike: `8xA100+8xV100`."""

from pathlib import Path

import pytest

from meshwright.cluster.detect import find_cluster
from meshwright.cluster.file import load_cluster
from meshwright.errors import InputError


def shapes(name: str) -> list[tuple[int, int, str]]:
    return [(node.number, node.count, node.device.name) for node in find_cluster(name).nodes]


@pytest.mark.parametrize(
    ("name", "nodes"),
    [
        ("8xA100-40GB+8xV100", [(1, 8, "A100-40GB"), (1, 8, "V100-16GB")]),
        ("2x8xA100+1x4xH100", [(2, 8, "A100-80GB"), (1, 4, "H100")]),
        ("A100 + 3xT4 + V100-32GB", [(1, 1, "A100-80GB"), (1, 3, "T4"), (1, 1, "V100-32GB")]),
        ("8xA100+4xV100+2x8xA100", [(3, 8, "A100-80GB"), (1, 4, "V100-16GB")]),  # equal devices are neighbours
        ("8xA100+V100+4xA100", [(1, 8, "A100-80GB"), (1, 4, "A100-80GB"), (1, 1, "V100-16GB")]),
        ("2xXeon-8480+4xNeoverse-N1", [(1, 2, "Xeon-8480"), (1, 4, "Neoverse-N1")]),
    ],
)
def test_machines_are_joined_by_plus(name: str, nodes: list[tuple[int, int, str]]) -> None:
    cluster = find_cluster(name)
    assert shapes(name) == nodes
    assert cluster.device_count == sum(number * count for number, count, _ in nodes)
    assert not cluster.is_uniform


def test_the_slowest_network_is_between_all() -> None:
    slow, fast = find_cluster("2x8xV100").link, find_cluster("2x8xA100").link
    assert slow is not None
    assert fast is not None
    assert slow.bandwidth_bytes_per_s < fast.bandwidth_bytes_per_s
    assert find_cluster("8xA100+8xV100").link == slow
    assert find_cluster("8xA100@10G+8xV100").link == find_cluster("2xA100@10G").link
    named = find_cluster("8xA100@PCIe4-x16+8xV100@PCIe3-x16")
    assert [node.link.name for node in named.nodes] == ["PCIe4-x16", "PCIe3-x16"]


def test_equal_machines_are_what_they_were() -> None:
    joined, plain = find_cluster("8xA100+8xA100"), find_cluster("2x8xA100")
    assert joined.is_uniform
    assert (joined.nodes, joined.link) == (plain.nodes, plain.link)


def test_equal_devices_of_a_file_become_neighbours_unless_ranks_were_measured(tmp_path: Path) -> None:
    text = "nodes: [{device: A100, count: 8}, {device: V100, count: 4}, {device: A100, count: 8}]\nlink: 100G\n"
    file = tmp_path / "lab.yaml"
    file.write_text(text)
    assert [node.device.name for node in load_cluster(file).nodes] == ["A100-80GB", "V100-16GB"]
    file.write_text(f"{text}based_on: measured\n")
    assert [node.device.name for node in load_cluster(file).nodes] == ["A100-80GB", "V100-16GB", "A100-80GB"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("8xA100+", "write 'local' for this machine"),
        ("+8xA100", "write 'local' for this machine"),
        ("8xA100++8xV100", "write 'local' for this machine"),
        ("+", "write 'local' for this machine"),
        ("8xA100+8xV10O", "there is no device 'V10O': did you mean 'V100'?"),
        ("8xA100+local", "local is this machine, which cannot be joined with others by name"),
        ("2xcpu+8xA100", "cpu is this machine, which cannot be joined with others by name"),
        ("8xA100+2x2x8xV100", "write 'local' for this machine"),
        ("8xA100+8xV100@NVLnk2", "there is no link 'NVLnk2' in the catalog"),
        ("8xA100+8xXeon-8480", "nodes mix devices of kind cpu and cuda"),
        ("8xA100+8xMI300X", "nodes mix devices of the platforms cuda (A100-80GB) and rocm (MI300X)"),
        ("10000x8xA100+10000x8xV100", "devices: at most"),
        ("+".join(["A100"] * 5000), "has 5,000 parts: at most 64"),
        ("8xA100+" + "9" * 900 + "xV100", "devices: at most"),
    ],
)
def test_names_that_cannot_be_joined_are_refused_in_one_line(name: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        find_cluster(name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
