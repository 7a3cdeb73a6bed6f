"""What a sweep varies, and what `what-if` changes of a cluster.

devices=8..1024     powers of two; 8..64:8 in steps of 8; 8,24,64 as listed. More than a machine has: whole machines
nodes=1..16         machines
link=200G,400G      the network between machines, or the link within one (by name, or as a factor: 2x)
gpu=A100-80GB,H100  the same numbers of other devices, with the links that the catalog has for them
batch=64..1024      samples of a step
what-if             link (between machines, or within the only one), within, compute (devices that compute faster) or
                    memory: a factor (2x) or, for memory, a size (141GB)
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from meshwright.cluster.catalog import find_link, is_within
from meshwright.cluster.cluster import Cluster, Device, Link, Node
from meshwright.cluster.detect import find_cluster, with_shared_cores
from meshwright.errors import InputError, did_you_mean
from meshwright.numbers.limits import LARGEST_COUNT, MOST_DEVICES
from meshwright.plan_fields.quantities import read_bytes
from meshwright.planner.inputs import PlanningInputs

SWEEPS = ("devices", "nodes", "link", "gpu", "batch", "sequence")
_MOST = {"devices": MOST_DEVICES, "nodes": MOST_DEVICES, "batch": LARGEST_COUNT, "sequence": LARGEST_COUNT}
_CHANGES = ("link", "within", "compute", "memory")
MOST_POINTS = 40


def read_sweep(word: str) -> tuple[str, list[str]]:
    """Returns what `devices=8..1024` varies, and the values."""
    name, equals, text = word.partition("=")
    if not equals or (name in SWEEPS and not text):
        raise InputError(f"sweep {word}: there are no values: write devices=8..1024")
    if name not in SWEEPS:
        raise InputError(f"sweep {word}: '{name}' cannot be varied{did_you_mean(name, SWEEPS)}")
    values = [value for part in text.split(",") for value in _values(name, part.strip(), word)]
    values = list(dict.fromkeys(values))
    if len(values) > MOST_POINTS:
        raise InputError(f"sweep {word} has more than {MOST_POINTS} values, each of which is a search: write fewer")
    return name, values


def _values(name: str, part: str, word: str) -> Iterator[str]:
    first, dots, rest = part.partition("..")
    if not dots:
        if not part or (name in _MOST and not _is_count(part)):
            raise InputError(f"sweep {word}: '{part}' is no number above 0: write 8..1024, or 8,16,32")
        yield _checked(name, part, word)
        return
    last, colon, step = rest.partition(":")
    numbers = [first, last, *([step] if colon else [])]
    if name not in _MOST or not all(map(_is_count, numbers)):
        raise InputError(f"sweep {word}: '{part}' is no range of {name}: write 8..1024, or 8..64:8 for steps of 8")
    _checked(name, last, word)
    value = int(first)
    if value > int(last):
        raise InputError(f"sweep {word}: {first} is larger than {last}: write the smaller number first")
    count = 0
    while value <= int(last) and count <= MOST_POINTS:
        yield str(value)
        value = value + int(step) if colon else 2 * value
        count += 1


def _is_count(text: str) -> bool:
    return bool(re.fullmatch(r"0*[1-9][0-9]{0,17}", text))


def _checked(name: str, text: str, word: str) -> str:
    """The value of a sweep. Raises an `InputError` for a number that is too large."""
    if name not in _MOST:
        return text
    if int(text) > _MOST[name]:
        raise InputError(f"sweep {word}: {name} is {text}: at most {_MOST[name]:,}")
    return str(int(text))


def varied(inputs: PlanningInputs, name: str, value: str) -> PlanningInputs:
    """The inputs of a sweep's point. A sequence changes the model, so it is varied by the caller. The price of a device
    stays the same where only the number of devices changes."""
    cluster = inputs.cluster
    if name == "batch":
        return replace(inputs, global_batch=int(value))
    if name in ("devices", "nodes"):
        other = with_devices(cluster, int(value)) if name == "devices" else with_nodes(cluster, int(value))
        price = cluster.price_per_hour
        if price is not None:
            scaled = price * other.device_count / cluster.device_count
            other = other.model_copy(update={"price_per_hour": scaled})
        return replace(inputs, cluster=other)
    if name == "link":
        return replace(inputs, cluster=with_link(cluster, value))
    if name == "gpu":
        return replace(inputs, cluster=with_gpu(cluster, value))
    return inputs


def with_devices(cluster: Cluster, devices: int) -> Cluster:
    """A cluster with this number of the same devices: on one machine, or on whole machines. CPU ranks of one machine
    share its cores and its memory."""
    node = _only_node(cluster, f"devices={devices}")
    if cluster.kind == "cpu" and node.number == 1:
        return with_shared_cores(cluster, devices, f"{devices}xcpu")
    if devices <= node.count:
        return _part_of_node(cluster, node, devices)
    if devices % node.count:
        raise InputError(
            f"sweep devices: {devices} devices are no whole machines of {node.count} {node.device.name}: choose"
            f" multiples of {node.count}"
        )
    return with_nodes(cluster, devices // node.count)


def _part_of_node(cluster: Cluster, node: Node, devices: int) -> Cluster:
    """A machine with fewer devices, which have as many CPU cores each as before."""
    name = f"{devices}x{node.device.name}" if devices > 1 else node.device.name
    cores = max(1, node.cores * devices // node.count)
    part = node.model_copy(update={"count": devices, "number": 1, "cores": cores})
    return cluster.model_copy(update={"nodes": (part,), "name": name})


def with_nodes(cluster: Cluster, nodes: int) -> Cluster:
    node = _only_node(cluster, f"nodes={nodes}")
    if nodes * node.count > MOST_DEVICES:
        raise InputError(f"sweep nodes: {nodes} machines have {nodes * node.count:,} devices: at most {MOST_DEVICES:,}")
    if nodes > 1 and cluster.link is None:
        raise InputError(
            f"sweep nodes: '{cluster.name}' has no network between machines: name a cluster such as 2x8xH100"
        )
    name = f"{nodes}x{node.count}x{node.device.name}" if nodes > 1 else f"{node.count}x{node.device.name}"
    return cluster.model_copy(update={"nodes": (node.model_copy(update={"number": nodes}),), "name": name})


def with_link(cluster: Cluster, word: str) -> Cluster:
    """A cluster with another network between machines, or another link within machines."""
    if word.endswith("x") and _factor(word):
        return changed(cluster, f"link={word}")
    link = find_link(word)
    if is_within(word):
        nodes = tuple(node.model_copy(update={"link": link}) for node in cluster.nodes)
        return cluster.model_copy(update={"nodes": nodes, "name": f"{cluster.name}@{word}"})
    if sum(node.number for node in cluster.nodes) == 1:
        raise InputError(
            f"sweep link={word}: '{cluster.name}' is one machine, in which a network between machines changes"
            " nothing: name a cluster such as 2x8xH100, or a link within machines such as NVLink4"
        )
    return cluster.model_copy(update={"link": link, "name": f"{cluster.name}@{word}"})


def with_gpu(cluster: Cluster, device: str) -> Cluster:
    node = _only_node(cluster, f"gpu={device}")
    counts = f"{node.number}x{node.count}x" if node.number > 1 else f"{node.count}x"
    return find_cluster(f"{counts}{device}")


def changed(cluster: Cluster, change: str) -> Cluster:
    """The cluster as `what-if` says: `link=2x`, `memory=141GB`."""
    name, equals, text = change.partition("=")
    if name not in _CHANGES or not equals:
        raise InputError(
            f"what-if {change}: write what would be different, such as link=2x or memory=141GB"
            f"{did_you_mean(name, _CHANGES) if equals else ''}"
        )
    factor = _factor(text)
    if factor is None and name != "memory":
        raise InputError(f"what-if {change}: '{text}' is no factor: write {name}=2x")
    update: dict[str, object] = {"name": f"{cluster.name} with {change}"}
    if name == "link" and cluster.link is not None and sum(node.number for node in cluster.nodes) > 1:
        update["link"] = _faster(cluster.link, factor or 1.0)
        return cluster.model_copy(update=update)
    nodes = []
    for node in cluster.nodes:
        device = node.device
        if name in ("link", "within"):
            node = node.model_copy(update={"link": _faster(node.link, factor or 1.0)})
        elif name == "memory":
            size = int(device.memory_bytes * factor) if factor else read_bytes(text, "what-if memory")
            device = device.model_copy(update={"memory_bytes": size})
        else:
            device = _faster_device(device, factor or 1.0)
        nodes.append(node.model_copy(update={"device": device}))
    return cluster.model_copy(update={**update, "nodes": tuple(nodes)})


def is_improvement(cluster: Cluster, change: str) -> bool:
    """Whether the change makes no part of the cluster worse."""
    other = changed(cluster, change)
    links = [(node.link, new.link) for node, new in zip(cluster.nodes, other.nodes, strict=True)]
    if cluster.link is not None and other.link is not None:
        links.append((cluster.link, other.link))
    has_slower_link = any(new.bandwidth_bytes_per_s < old.bandwidth_bytes_per_s for old, new in links)
    return not has_slower_link and all(
        new.device.memory_bytes >= old.device.memory_bytes
        and new.device.bandwidth_bytes_per_s >= old.device.bandwidth_bytes_per_s
        for old, new in zip(cluster.nodes, other.nodes, strict=True)
    )


def _faster_device(device: Device, factor: float) -> Device:
    """A device that computes and reads its memory faster. Its launches take as long."""
    update: dict[str, object] = {
        "rates": {dtype: value * factor for dtype, value in device.rates.items()},
        "clock_hz": device.clock_hz * factor,
        "bandwidth_bytes_per_s": device.bandwidth_bytes_per_s * factor,
        "operators": tuple(
            operator.model_copy(update={"seconds": operator.seconds / factor}) for operator in device.operators
        ),
    }
    return device.model_copy(update=update)


def _faster(link: Link, factor: float) -> Link:
    """The link with a larger bandwidth; measured curves are shorter by the same factor, except for their latency."""
    curves = {}
    for collective, measured in link.curves.items():
        shorter = []
        for curve in measured:
            least = min((point[1] for point in curve.points), default=0.0)
            points = tuple((size, least + (value - least) / factor) for size, value in curve.points)
            shorter.append(curve.model_copy(update={"points": points}))
        curves[collective] = tuple(shorter)
    bandwidth = link.bandwidth_bytes_per_s * factor
    return link.model_copy(update={"bandwidth_bytes_per_s": bandwidth, "curves": curves})


def _factor(text: str) -> float | None:
    match = re.fullmatch(r"([0-9]{1,7}(?:\.[0-9]{1,6})?)x", text)
    return float(match[1]) if match and 0 < float(match[1]) <= 1e6 else None


def _only_node(cluster: Cluster, what: str) -> Node:
    if len(cluster.nodes) > 1:
        raise InputError(
            f"sweep {what}: the machines of '{cluster.name}' differ, and this does not say which of them to take:"
            " sweep batch, sequence or link, or compare clusters (meshwright ask for JOB time --clusters NAME=PRICE,…)"
        )
    return cluster.nodes[0]
