"""Builds clusters from names: `8xH100`, `4x8xA100-80GB` (nodes × devices), `16x8xH100@400G` (with the link), and
`8xA100+8xV100` (machines that are not alike)."""

import re
from collections.abc import Sequence
from math import prod

from meshwright.cluster.cache import calibrated_device
from meshwright.cluster.catalog import find_entry, find_link, is_within, nearest_device
from meshwright.cluster.cluster import BasedOn, Cluster, Device, Link, Node
from meshwright.errors import InputError
from meshwright.files.yaml_file import validate
from meshwright.numbers.limits import MOST_DEVICES

_NAME = re.compile(r"((?:[1-9]\d{0,999}x)*)([^@]+)((?:@[^@]+)*)")  # Python converts no number of over 4,300 digits


def parse_cluster_name(part: str, whole: str = "") -> tuple[list[int], str, list[str]]:
    """Returns the counts, the device and the links in a part of a name: [4, 8], A100 and [400G] for `4x8xA100@400G`.
    `whole` is the whole name, if that has other parts."""
    match, name = _NAME.fullmatch(part.strip()), whole or part
    counts = [int(count) for count in match[1].split("x") if count] if match else []
    if match is None or len(counts) > 2:
        raise InputError(f"cluster '{name}' is not known: {CLUSTER_NAME_HINT}")
    if prod(counts) > MOST_DEVICES:
        raise InputError(
            f"cluster '{name}' has {prod(counts):,} devices: at most {MOST_DEVICES:,}, for which planning takes seconds"
        )
    return counts, match[2], [link for link in match[3].split("@") if link]


CLUSTER_NAME_HINT = "write 'local' for this machine, a name such as 8xH100 or 4x8xA100-80GB@200G, or a YAML file"
_MOST_PARTS = 64  # kinds of machines in one name


def cluster_from_name(name: str) -> Cluster:
    """Returns a cluster of catalog devices. Its links are those of the machine that the device is usually part of,
    according to the catalog.

    A link after `@` replaces the link within nodes (`@PCIe3-x16`) or the network between nodes (`@400G`, the rate per
    device). Machines that are not alike are joined by `+`. The slowest of their networks is the link between all.
    """
    parts = name.split("+")
    if len(parts) > _MOST_PARTS:
        raise InputError(f"cluster '{name[:40]}…' has {len(parts):,} parts: at most {_MOST_PARTS} kinds of machines")
    nodes, networks = [], []
    for part in parts:
        node, network = _part_of_name(part, name)
        nodes.append(node)
        networks.append(network)
    devices = sum(node.count * node.number for node in nodes)
    if devices > MOST_DEVICES:
        raise InputError(
            f"cluster '{name}' has {devices:,} devices: at most {MOST_DEVICES:,}, for which planning takes seconds"
        )
    link = min(networks, key=lambda network: network.bandwidth_bytes_per_s)
    based_on = basis(*(node.device for node in nodes))
    raw = {"name": name, "nodes": as_neighbours(nodes), "link": link, "based_on": based_on}
    return validate(Cluster, raw, f"cluster '{name}'")


def _part_of_name(part: str, name: str) -> tuple[Node, Link]:
    """The machines that one part of a name describes, and their network."""
    counts, word, links = parse_cluster_name(part, name)
    if word.lower() in ("local", "cpu") and part != name:
        raise InputError(
            f"cluster '{name}' is not known: {word} is this machine, which cannot be joined with others by name:"
            " write a device of the catalog, or a YAML file (docs/cluster.md)"
        )
    number, devices = [1, 1, *counts][-2:]
    try:
        entry = find_entry(word)
    except InputError:
        hint = nearest_device(word, "local", "cpu")
        raise InputError(f"cluster '{name}' is not known: there is no device '{word}'{hint}") from None
    within, between = entry.within, entry.between
    for link in links:
        if is_within(link):
            within = link
        else:
            between = link
    try:
        node_link, network = find_link(within), find_link(between)
    except InputError as error:
        raise InputError(f"cluster '{name}' is not known: {error}") from None
    device = calibrated_device(entry.device.name) or entry.device
    return Node(device=device, count=devices, link=node_link, cores=entry.cores * devices, number=number), network


def as_neighbours(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes, those with equal devices next to each other, in the order in which each device comes first. Ranks fill
    nodes in this order. Equal nodes become one with their number."""
    order = {id(node): next(i for i, other in enumerate(nodes) if other.device == node.device) for node in nodes}
    joined: list[Node] = []
    for node in sorted(nodes, key=lambda node: order[id(node)]):
        if joined and joined[-1].model_copy(update={"number": node.number}) == node:
            joined[-1] = node.model_copy(update={"number": joined[-1].number + node.number})
        else:
            joined.append(node)
    return tuple(joined)


def basis(*devices: Device) -> BasedOn:
    """Returns `Cluster.based_on` for a cluster of these devices: `calibrated` if all of them have measured operators,
    else `datasheet`."""
    return "calibrated" if all(device.operators for device in devices) else "datasheet"
