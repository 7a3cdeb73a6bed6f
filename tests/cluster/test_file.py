"""Cluster files: mixed nodes, prices, devices that are written out, and one line for each mistake."""

from pathlib import Path

import pytest

from meshwright.cluster.detect import find_cluster
from meshwright.cluster.file import load_cluster
from meshwright.errors import InputError

MIXED = """
nodes:
  - {device: A100-80GB, count: 8, number: 4}
  - {device: V100-32GB, count: 4, link: PCIe3-x16, cores: 40}
link: InfiniBand-HDR
price_per_hour: 98.5
"""
WRITTEN_OUT = """
name: lab
nodes:
  - device:
      name: Z900
      kind: cuda
      memory_bytes: 34359738368
      bandwidth_bytes_per_s: 1e12
      rates: {fp32: 2e13, bf16: 1e14}
    count: 2
    link: {name: bridge, bandwidth_bytes_per_s: 5e10, latency_s: 5e-6}
    cores: 16
"""


def write_cluster(folder: Path, text: str) -> str:
    file = folder / "mine.yaml"
    file.write_text(text)
    return str(file)


def test_mixed_nodes_and_a_price(tmp_path: Path) -> None:
    cluster = find_cluster(write_cluster(tmp_path, MIXED))
    assert (cluster.name, cluster.device_count, cluster.kind, cluster.cores) == ("mine", 36, "cuda", 40)
    assert [node.link.name for node in cluster.nodes] == ["NVLink3", "PCIe3-x16"]
    assert (cluster.price_per_hour, cluster.based_on) == (98.5, "datasheet")


@pytest.mark.parametrize("text", [MIXED, WRITTEN_OUT])
def test_a_cluster_that_is_written_reads_back_equal(tmp_path: Path, text: str) -> None:
    cluster = load_cluster(write_cluster(tmp_path, text))
    assert load_cluster(write_cluster(tmp_path, cluster.to_yaml())) == cluster


@pytest.mark.parametrize("name", ["8xH100", "3xCore", "2x8xV100-16GB@PCIe3-x16"])
def test_a_named_cluster_can_be_written_to_a_file(tmp_path: Path, name: str) -> None:
    assert load_cluster(write_cluster(tmp_path, find_cluster(name).to_yaml())) == find_cluster(name)


def test_a_device_can_be_in_another_file(tmp_path: Path) -> None:
    device = find_cluster(write_cluster(tmp_path, WRITTEN_OUT)).nodes[0].device
    (tmp_path / "z900.yaml").write_text(device.to_yaml())
    text = "nodes: [{device: z900.yaml, count: 2, link: PCIe4-x16, cores: 8}]"
    assert find_cluster(write_cluster(tmp_path, text)).nodes[0].device == device


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nnodes: }", ", line 2: not YAML: "),
        ("- 8xH100", ": a cluster file is a YAML mapping, this one is list"),
        ("price_per_hour: 3", ": nodes is missing"),
        ("nodes: []", ": nodes is empty: a cluster has one or more"),
        ("nodes: [7]", ": nodes.0 is 7: write a mapping"),
        ("nodes: [{count: 8}]", ": nodes.0.device is missing"),
        (
            "nodes: [{device: H1000}]",
            ": nodes.0.device: there is no device 'H1000' in the catalog: did you mean 'H100'?",
        ),
        ("nodes: [{device: H100, link: NVLnk4}]", ": nodes.0.link: there is no link 'NVLnk4' in the catalog: did you"),
        ("nodes: [{device: H100, cuont: 8}]", ": nodes.0.cuont is not a field: did you mean 'count'?"),
        ("nodes: [{device: H100, count: eight}]", ": nodes.0.count is 'eight': input should be a valid integer"),
        ("nodes: [{device: H100, count: 0}]", ": nodes.0.count is 0: input should be greater than 0"),
        (
            "nodes: [{device: H100}]\nprise_per_hour: 2",
            ": prise_per_hour is not a field: did you mean 'price_per_hour'?",
        ),
        ("nodes: [{device: H100}]\nprice_per_hour: -2", ": price_per_hour is -2: input should be greater than 0"),
        ("nodes: [{device: H100, number: 2}]", ": link is missing: several nodes need one between them"),
        ("nodes: [{device: H100}, {device: Core}]\nlink: 10G", ": nodes mix devices of kind cpu and cuda"),
        (WRITTEN_OUT.replace("rates:", "ratse:"), ": nodes.0.device.ratse is not a field: did you mean 'rates'?"),
        (
            WRITTEN_OUT.replace("bf16: 1e14", "bf61: 1e14"),
            ": nodes.0.device.rates.bf61 is 'bf61': input should be 'fp64'",
        ),
        (
            WRITTEN_OUT.replace("fp32: 2e13, ", ""),
            ": nodes.0.device 'Z900' needs memory_bytes, bandwidth_bytes_per_s and rates.fp32",
        ),
        (
            WRITTEN_OUT.replace("bandwidth_bytes_per_s: 5e10, ", ""),
            ": nodes.0.link 'bridge' needs a bandwidth_bytes_per_s",
        ),
    ],
)
def test_a_malformed_file_is_one_line_that_names_the_field(tmp_path: Path, text: str, message: str) -> None:
    file = write_cluster(tmp_path, text)
    with pytest.raises(InputError) as caught:
        find_cluster(file)
    assert str(caught.value).startswith(file + message)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(InputError, match=r"^nowhere/my\.yaml: there is no such cluster file$"):
        find_cluster("nowhere/my.yaml")
