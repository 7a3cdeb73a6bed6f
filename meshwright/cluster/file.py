"""Clusters and devices as YAML files: the devices and links in them are names from the catalog, files, or in full."""

from pathlib import Path
from typing import Any

from meshwright.cluster.cache import calibrated_device
from meshwright.cluster.catalog import Entry, find_entry, find_link
from meshwright.cluster.cluster import Cluster, Device
from meshwright.cluster.names import basis
from meshwright.errors import InputError
from meshwright.yaml_file import read_mapping, validated


def is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or "/" in name


def load_device(path: str | Path) -> Device:
    return validated(Device, read_mapping(Path(path), "device"), str(path))


def load_cluster(path: str | Path) -> Cluster:
    """Reads a cluster; what a node does not say (count, link, cores) is as in the usual machine of its device."""
    file = Path(path)
    raw = {"name": file.stem, **read_mapping(file, "cluster")}
    nodes = raw.get("nodes")
    if isinstance(nodes, list):
        raw["nodes"] = [_node(node, index, file) for index, node in enumerate(nodes)]
    if isinstance(raw.get("link"), str):
        raw["link"] = _named_link(raw["link"], f"{file}: link")
    cluster = validated(Cluster, raw, str(path))
    if "based_on" in raw:
        return cluster
    return cluster.model_copy(update={"based_on": basis(*(node.device for node in cluster.nodes))})


def _node(raw: Any, index: int, file: Path) -> Any:
    if not isinstance(raw, dict):
        return raw
    where = f"{file}: nodes.{index}"
    node = {"count": 1, **raw}
    device, entry = _device(node.get("device"), file, where)
    if device is not None:
        node["device"] = device
    if entry is not None:
        node.setdefault("link", entry.within)
        if isinstance(node["count"], int):
            node.setdefault("cores", max(1, entry.cores * node["count"]))
    if isinstance(node.get("link"), str):
        node["link"] = _named_link(node["link"], f"{where}.link")
    return node


def _device(raw: Any, file: Path, where: str) -> tuple[Device | None, Entry | None]:
    if not isinstance(raw, str):
        return None, None  # in full, or missing: the fields are checked with the rest
    if is_file(raw):
        beside = file.parent / raw
        device = load_device(beside if beside.exists() else raw)
        try:
            return device, find_entry(device.name)
        except InputError:
            return device, None
    try:
        entry = find_entry(raw)
    except InputError as error:
        raise InputError(f"{where}.device: {error}") from None
    return calibrated_device(entry.device.name) or entry.device, entry


def _named_link(name: str, where: str) -> Any:
    try:
        return find_link(name.removeprefix("@"))
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
