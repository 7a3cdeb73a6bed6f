"""The catalog: every device and link loads, and every constant in it says where it comes from."""

import re
from pathlib import Path

import pytest

from meshwright.cluster.catalog import (
    entries,
    entry_reported_as,
    find_entry,
    find_link,
    is_within,
    links_between,
    links_within,
)
from meshwright.cluster.detect import find_cluster
from meshwright.errors import InputError

DEVICES = [
    *("TitanXp", "P100", "V100-16GB", "V100-32GB", "T4", "A10", "L4", "A100-40GB", "A100-80GB", "A6000", "RTX3090"),
    *(
        "RTX4090",
        "H100-PCIe",
        "H100",
        "H200",
        "B200",
        "B300",
        "GB200",
        "GB300",
        "GH200",
        "Core",
        "Xeon-8480",
        "Neoverse-N1",
    ),
]
OTHER_DEVICES = ["MI250X", "MI300X", "MI325X", "Gaudi2", "Gaudi3", "M1-Ultra", "RTX5090"]
LINKS = [
    *("PCIe3-x16", "PCIe4-x16", "PCIe5-x16", "NVLink1", "NVLink2", "NVLink3", "NVLink4", "NVLink5"),
    *("InfiniBand-EDR", "InfiniBand-HDR", "InfiniBand-NDR", "RoCE-100G", "Ethernet-10G", "Ethernet-800G"),
    *("OmniPath-100G", "InfinityFabric3", "Gaudi3-Ethernet"),
]
DOCUMENT = Path(__file__).parents[2] / "docs" / "cluster.md"
CONSTANTS = ["memory_bytes", "bandwidth_bytes_per_s", "rates", "launch_s", "instructions", "context_bytes", "cores"]


def test_the_catalog_has_common_devices_and_links() -> None:
    assert {*DEVICES, *OTHER_DEVICES} <= set(entries())
    assert set(LINKS) <= {*links_within(), *links_between()}


@pytest.mark.parametrize(("title", "kind"), [("GPUs", "cuda"), ("CPU cores", "cpu")])
def test_docs_cluster_md_lists_the_devices_of_the_catalog(title: str, kind: str) -> None:
    text = " ".join(DOCUMENT.read_text().partition(f"**{title}:**")[2].partition("\n\n")[0].split())
    listed = re.sub(r" \([^)]*\)", "", text).removesuffix(".").split(", ")  # without remarks such as `(also V100)`
    assert set(listed) == {name for name, entry in entries().items() if entry.device.kind == kind}
    for name, alias in re.findall(r"(\S+) \(also ([^)]*)\)", text):
        assert find_entry(alias) is entries()[name]


@pytest.mark.parametrize("name", entries())
def test_every_constant_of_a_device_has_a_source(name: str) -> None:
    entry = entries()[name]
    device = entry.device
    assert device.is_known
    assert device.launch_s > 0
    assert device.context_bytes > 0
    assert device.instructions
    for constant in CONSTANTS:
        assert len(device.sources.get(constant, "")) > 10, f"{name}.{constant} has no source"
    if device.kind == "cuda" and device.platform != "mps":  # Apple's GPUs share the CPU's memory
        assert 1e9 < device.host_bandwidth_bytes_per_s < device.bandwidth_bytes_per_s
        assert len(device.sources["host_bandwidth_bytes_per_s"]) > 10
    assert is_within(entry.within)
    assert not is_within(find_link(entry.between).name)


@pytest.mark.parametrize("name", [*links_within(), *links_between(), *LINKS])
def test_every_constant_of_a_link_has_a_source(name: str) -> None:
    link = find_link(name)
    assert link.name == name
    assert link.bandwidth_bytes_per_s > 0
    assert link.latency_s > 0
    assert all(len(link.sources.get(constant, "")) > 10 for constant in ("bandwidth_bytes_per_s", "latency_s"))
    assert all(len(curve.source) > 10 for curves in link.curves.values() for curve in curves)


def test_multiprocessors_and_their_clock_make_the_rate_of_fp32() -> None:
    """Each multiprocessor has 64 or 128 lanes that multiply and add in one cycle."""
    for name, entry in entries().items():
        device = entry.device
        if device.kind == "cuda" and device.platform in ("cuda", "rocm"):
            lanes = device.rates["fp32"] / (2 * device.multiprocessors * device.clock_hz)
            assert min(abs(lanes / 64 - 1), abs(lanes / 128 - 1)) < 0.015, f"{name}: {lanes:.1f} lanes"
            assert all(len(device.sources[constant]) > 10 for constant in ("multiprocessors", "clock_hz"))


def test_rates_have_the_ratios_of_dense_products() -> None:
    """The rates of tensor cores halve from fp8 to bf16 to tf32. A sparse figure among dense ones would break this."""
    for name, entry in entries().items():
        rates = entry.device.rates
        if "fp8" in rates:
            assert rates["fp8"] == pytest.approx(2 * rates["bf16"], rel=0.03), name
        if "tf32" in rates:
            assert rates["bf16"] == pytest.approx(2 * rates["tf32"], rel=0.03), name


def test_devices_are_found_by_alias_and_by_driver_name() -> None:
    assert find_entry("v100").device.name == "V100-16GB"
    assert find_entry("h100-sxm").device.name == "H100"
    entry = entry_reported_as("NVIDIA H200")
    assert entry is not None
    assert entry.device.name == "H200"
    assert entry_reported_as("NVIDIA Z900") is None
    reported = [name for entry in entries().values() for name in entry.reported]
    names = [name.lower() for key, entry in entries().items() for name in {key.lower(), *map(str.lower, entry.aliases)}]
    assert len(set(reported)) == len(reported)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("name", "shape", "within", "between"),
    [
        ("H100", (1, 1), "NVLink4", "InfiniBand-NDR"),
        ("8xH100", (1, 8), "NVLink4", "InfiniBand-NDR"),
        ("4x8xA100-80GB", (4, 8), "NVLink3", "InfiniBand-HDR"),
        ("16x8xH100@400G", (16, 8), "NVLink4", "InfiniBand-NDR"),
        ("16x8xh100@10G", (16, 8), "NVLink4", "Ethernet-10G"),
        ("2x4xA100-80GB@RoCE-100G", (2, 4), "NVLink3", "RoCE-100G"),
        ("8xV100-16GB@PCIe3-x16", (1, 8), "PCIe3-x16", "InfiniBand-50G"),
        ("2x8xV100-16GB@PCIe3-x16@37.5G", (2, 8), "PCIe3-x16", "Ethernet-37.5G"),
        ("2xRTX3090", (1, 2), "PCIe4-x16", "Ethernet-10G"),
        ("1250x8xH100", (1250, 8), "NVLink4", "InfiniBand-NDR"),
    ],
)
def test_a_name_gives_nodes_devices_and_links(name: str, shape: tuple[int, int], within: str, between: str) -> None:
    cluster = find_cluster(name)
    (node,) = cluster.nodes
    assert cluster.link is not None
    assert (node.number, node.count) == shape
    assert cluster.device_count == shape[0] * shape[1]
    assert (node.link.name, cluster.link.name) == (within, between)
    assert cluster.based_on == "datasheet"


def test_a_rate_is_per_device_and_in_bits() -> None:
    assert find_link("400G").bandwidth_bytes_per_s == 50e9
    assert find_link("Ethernet-25G").bandwidth_bytes_per_s == 25e9 / 8


def test_an_unknown_link_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match=r"no link 'NVLink44' in the catalog: did you mean 'NVLink4'\?"):
        find_link("NVLink44")
