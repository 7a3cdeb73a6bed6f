"""Which of the catalog's clusters a row ran on, as a name: `128x8xA100-80GB@InfiniBand-HDR`."""

from functools import cache
from pathlib import Path
from typing import Any

from meshwright.cluster.catalog import find_entry
from meshwright.cluster.cluster import Device
from meshwright.cluster.names import parse_cluster_name
from meshwright.errors import InputError
from meshwright.yaml_file import read_mapping
from validation.runs.case import NotCovered
from validation.runs.rows import PublishedRow

FILE = Path(__file__).with_name("hardware.yaml")


@cache
def _names() -> dict[str, Any]:
    return read_mapping(FILE, "names of published hardware")


def cluster_of(row: PublishedRow) -> tuple[str, tuple[str, ...]]:
    """The cluster's name, and the defaults that went into it."""
    name, defaults = _device(str(row.hardware["gpu"]))
    ranks = row.hardware.get("n_gpus")
    if ranks is None:
        raise NotCovered("the number of GPUs is not stated")
    a_node = min(row.hardware.get("gpus_per_node", ranks), ranks)
    if ranks % a_node:
        raise NotCovered("the GPUs do not fill their nodes evenly")
    nodes = ranks // a_node
    if nodes == 1:
        return (f"{ranks}x{name}" if ranks > 1 else name), defaults
    link, words = _network(row.hardware.get("inter"), name)
    return f"{nodes}x{a_node}x{name}@{link}", defaults + words


def device_of(cluster: str) -> Device:
    """The device as the catalog has it: nothing that was measured on the machine this runs on."""
    return find_entry(parse_cluster_name(cluster)[1]).device


def _device(gpu: str) -> tuple[str, tuple[str, ...]]:
    known = _names()["gpus"].get(gpu)
    if known is None:
        mixed = "+" in gpu
        raise NotCovered("nodes of different GPUs" if mixed else f"the GPU is given as '{gpu}'")
    name = known["device"]
    try:
        find_entry(name)
    except InputError:
        raise NotCovered(f"the catalog has no {name}") from None
    return name, ((f"{name} for {known['for']}",) if "for" in known else ())


def _network(inter: str | None, device: str) -> tuple[str, tuple[str, ...]]:
    if inter is None:
        usual = find_entry(device).between
        return usual, (f"network {usual}",)
    known = _names()["networks"].get(inter)
    if known is None:
        raise NotCovered(f"the network is given as '{inter}'")
    return known["link"], ((f"{known['link']} for {known['for']}",) if "for" in known else ())
