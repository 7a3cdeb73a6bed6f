"""Reads clusters and devices from YAML files. In a cluster's file, a device is a name of the catalog, a file or written
out; a link is a name of the catalog or written out."""

from pathlib import Path
from typing import Any

from meshwright.cluster.cache import calibrated_device
from meshwright.cluster.catalog import CatalogEntry, find_entry, find_link
from meshwright.cluster.cluster import Cluster, Device
from meshwright.cluster.names import as_neighbours, basis
from meshwright.errors import InputError
from meshwright.files.user_path import user_path
from meshwright.files.yaml_file import read_mapping, validate


def is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or "/" in name


def load_device(path: str | Path) -> Device:
    return validate(Device, read_mapping(user_path(path, "the device file"), "device"), str(path))


def load_cluster(path: str | Path) -> Cluster:
    """Reads a cluster. A node without `count` has one device. A node without `link` or `cores` gets the link or the
    cores of the machine that its device is usually part of, if the catalog has the device. Nodes with equal devices
    become neighbours, unless they were measured in the order of their ranks."""
    file = user_path(path, "the cluster file")
    raw = {"name": file.stem, **read_mapping(file, "cluster")}
    nodes = raw.get("nodes")
    if isinstance(nodes, list):
        raw["nodes"] = [_node(node, index, file) for index, node in enumerate(nodes)]
    if isinstance(raw.get("link"), str):
        raw["link"] = _named_link(raw["link"], f"{file}: link")
    cluster = validate(Cluster, raw, str(path))
    if cluster.based_on != "measured":
        cluster = cluster.model_copy(update={"nodes": as_neighbours(cluster.nodes)})
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


def _device(raw: Any, file: Path, where: str) -> tuple[Device | None, CatalogEntry | None]:
    if not isinstance(raw, str):
        return None, None  # written out or missing: checked together with the rest of the file
    if is_file(raw):
        path = user_path(raw, f"{where}.device")
        relative = file.parent / path
        device = load_device(relative if relative.is_file() else path)
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
