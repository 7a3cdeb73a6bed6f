"""Builds clusters from names: `8xH100`, `4x8xA100-80GB` (nodes × devices), `16x8xH100@400G` (with the link)."""

import re
from math import prod

from meshwright.cluster.cache import calibrated_device
from meshwright.cluster.catalog import find_entry, find_link, is_within, nearest_device
from meshwright.cluster.cluster import BasedOn, Cluster, Device, Node
from meshwright.errors import InputError
from meshwright.limits import MOST_DEVICES

_NAME = re.compile(r"((?:[1-9]\d{0,999}x)*)([^@]+)((?:@[^@]+)*)")  # Python converts no number of over 4,300 digits


def parse_cluster_name(name: str) -> tuple[list[int], str, list[str]]:
    """Returns the counts, the device and the links in a name: [4, 8], A100 and [400G] for `4x8xA100@400G`."""
    match = _NAME.fullmatch(name.strip())
    counts = [int(count) for count in match[1].split("x") if count] if match else []
    if match is None or len(counts) > 2:
        raise InputError(f"cluster '{name}' is not known: {CLUSTER_NAME_HINT}")
    if prod(counts) > MOST_DEVICES:
        raise InputError(
            f"cluster '{name}' has {prod(counts):,} devices: at most {MOST_DEVICES:,}, for which planning takes seconds"
        )
    return counts, match[2], [link for link in match[3].split("@") if link]


CLUSTER_NAME_HINT = "write 'local' for this machine, a name such as 8xH100 or 4x8xA100-80GB@200G, or a YAML file"


def cluster_from_name(name: str) -> Cluster:
    """Returns a cluster of catalog devices. Its links are those of the machine that the device is usually part of,
    according to the catalog.

    A link after `@` replaces the link within nodes (`@PCIe3-x16`) or the network between nodes (`@400G`, the rate per
    device).
    """
    counts, word, links = parse_cluster_name(name)
    nodes, devices = [1, 1, *counts][-2:]
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
    node = Node(device=device, count=devices, link=node_link, cores=entry.cores * devices, number=nodes)
    return Cluster(name=name, nodes=(node,), link=network, based_on=basis(device))


def basis(*devices: Device) -> BasedOn:
    """Returns `Cluster.based_on` for a cluster of these devices: `calibrated` if all of them have measured operators,
    else `datasheet`."""
    return "calibrated" if all(device.operators for device in devices) else "datasheet"
