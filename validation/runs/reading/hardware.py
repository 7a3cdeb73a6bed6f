"""The cluster that a row ran on, as a name that the catalog understands, such as `128x8xA100-80GB@InfiniBand-HDR`.
hardware.yaml translates the rows' names of GPUs and networks."""

from functools import cache
from pathlib import Path
from typing import Any

from meshwright.cluster.catalog import find_entry
from meshwright.cluster.cluster import Device
from meshwright.cluster.names import parse_cluster_name
from meshwright.errors import InputError
from meshwright.files.yaml_file import read_mapping
from validation.runs.case import NotCovered
from validation.runs.rows import PublishedRow

FILE = Path(__file__).with_name("hardware.yaml")
RACK, TRAY = 72, 4  # GPUs of one NVLink domain and of one machine, of GB200 and GB300 NVL72


@cache
def _names() -> dict[str, Any]:
    return read_mapping(FILE, "names of published hardware")


def cluster_of(row: PublishedRow) -> tuple[str, tuple[str, ...]]:
    """The name of the cluster, and the defaults that were used. Raises `NotCovered` if the catalog has no such device
    or network."""
    name, defaults = _device(str(row.hardware["gpu"]))
    ranks = row.hardware.get("n_gpus")
    if ranks is None:
        raise NotCovered("the number of GPUs is not stated")
    ranks_per_node = min(row.hardware.get("gpus_per_node", ranks), ranks)
    if row.hardware.get("gpus_per_node") == RACK and ranks > RACK:
        ranks_per_node = rack_part(ranks)
        defaults += (f"{ranks_per_node} of the {RACK} GPUs of a rack",)
    if ranks % ranks_per_node:
        raise NotCovered("the GPUs do not fill their nodes evenly")
    nodes = ranks // ranks_per_node
    if nodes == 1:
        return (f"{ranks}x{name}" if ranks > 1 else name), defaults
    link, network_defaults = _network(row.hardware.get("inter"), name)
    return f"{nodes}x{ranks_per_node}x{name}@{link}", defaults + network_defaults


def rack_part(ranks: int) -> int:
    """The GPUs that a larger run takes of each rack: the most machines that divide the machines of the run (Megatron-
    Bridge, scripts/performance/utils/executors.py: the segment of a Slurm job)."""
    machines = ranks // TRAY
    return TRAY * next(part for part in range(RACK // TRAY, 0, -1) if machines % part == 0)


def device_of(cluster: str) -> Device:
    """The device of a cluster as the catalog describes it, without measurements of the machine that this runs on."""
    return find_entry(parse_cluster_name(cluster)[1]).device


def _device(gpu: str) -> tuple[str, tuple[str, ...]]:
    """The catalog's name of the row's GPU, and the defaults that were used."""
    entry = _names()["gpus"].get(gpu)
    if entry is None:
        is_mixed = "+" in gpu
        raise NotCovered("nodes of different GPUs" if is_mixed else f"the GPU is given as '{gpu}'")
    name = entry["device"]
    try:
        find_entry(name)
    except InputError:
        raise NotCovered(f"the catalog has no {name}") from None
    return name, ((f"{name} for {entry['for']}",) if "for" in entry else ())


def _network(inter: str | None, device: str) -> tuple[str, tuple[str, ...]]:
    """The catalog's name of the row's network, and the defaults that were used. A row that states no network has the
    one that the catalog lists for nodes of such devices."""
    if inter is None:
        default_link = find_entry(device).between
        return default_link, (f"network {default_link}",)
    entry = _names()["networks"].get(inter)
    if entry is None:
        raise NotCovered(f"the network is given as '{inter}'")
    return entry["link"], ((f"{entry['link']} for {entry['for']}",) if "for" in entry else ())
