"""Which cluster a name means: this machine as it is, some of its CPU cores, catalog devices, or a file."""

from collections.abc import Callable

import torch

from meshwright.cluster.cache import calibrated_device, load_measured, save_measured
from meshwright.cluster.catalog import entry_reported_as, find_link
from meshwright.cluster.cluster import Cluster, Device, Link, Node
from meshwright.cluster.cores import usable_cores
from meshwright.cluster.file import is_file, load_cluster
from meshwright.cluster.graphics import list_gpus
from meshwright.cluster.names import named, parse
from meshwright.cluster.processor import memory_bytes, read_processor
from meshwright.errors import InputError

Measure = Callable[[Cluster], Cluster]


def find(name: str, measure: Measure | None = None) -> Cluster:
    """`local`: every GPU, or else one device a usable core; `3xcpu`: three CPU devices sharing the cores; a catalog
    name; a YAML file.

    This machine is only looked at, or taken as it was measured before; with `measure` (`probe.measure`) it is measured
    where it has not been yet.
    """
    if is_file(name):
        return load_cluster(name)
    if name == "local":
        return _measured(detect(), measure)
    counts, word, links = parse(name)
    if word.lower() == "cpu":
        if len(counts) > 1 or links:
            raise InputError(f"cluster '{name}' is not known: cpu is a core of this machine, write '3xcpu' for three")
        return _sharing(_measured(detect_cpu(), measure), counts[0] if counts else 1, name)
    return named(name)


def detect() -> Cluster:
    """This machine, nothing measured."""
    return _detect_gpus(torch.cuda.device_count()) if torch.cuda.device_count() else detect_cpu()


def detect_cpu() -> Cluster:
    """This machine's cores, each a device with its share of the memory."""
    cores = usable_cores()
    processor = read_processor()
    device = Device(
        name=processor.name,
        kind="cpu",
        memory_bytes=memory_bytes() // cores,
        instructions=processor.instructions,
        sources={"memory_bytes": "detected: its share of this machine's", "instructions": "detected: /proc/cpuinfo"},
    )
    node = Node(device=device, count=cores, link=Link(name="Loopback"), cores=cores)
    return Cluster(name="local", nodes=(node,), based_on="detected")


def _detect_gpus(count: int) -> Cluster:
    """GPUs that the catalog knows by the driver's name have its constants; others have none until measured."""
    gpus = list_gpus()
    gpu = min(gpus, key=lambda gpu: gpu.memory_bytes) if gpus else None
    entry = entry_reported_as(gpu.name) if gpu else None
    if entry:
        node = Node(device=entry.device, count=count, link=find_link(entry.within), cores=usable_cores())
        return Cluster(name="local", nodes=(node,), based_on="datasheet")
    device = Device(
        name=gpu.name if gpu else "GPU",
        kind="cuda",
        memory_bytes=gpu.memory_bytes if gpu else 0,
        sources={"memory_bytes": "detected: nvidia-smi"} if gpu else {},
    )
    node = Node(device=device, count=count, link=Link(name="unknown"), cores=usable_cores())
    return Cluster(name="local", nodes=(node,), based_on="detected")


def _measured(detected: Cluster, measure: Measure | None) -> Cluster:
    cluster = load_measured(detected)
    if cluster is None:
        if measure is None:
            return detected
        cluster = measure(detected)
        save_measured(detected, cluster)
    return _calibrated(cluster)


def _calibrated(cluster: Cluster) -> Cluster:
    """The measured machine with what `doctor --calibrate` found out about its device, memory shares as they are."""
    (node,) = cluster.nodes
    known = calibrated_device(node.device.name)
    if known is None or known.kind != node.device.kind:
        return cluster
    device = known.model_copy(update={"memory_bytes": node.device.memory_bytes})
    return cluster.model_copy(update={"nodes": (node.model_copy(update={"device": device}),), "based_on": "calibrated"})


def _sharing(cluster: Cluster, count: int, name: str) -> Cluster:
    """So many CPU devices on the same cores: each has its share of the machine's memory and bandwidth."""
    (node,) = cluster.nodes
    device = node.device.model_copy(
        update={
            "memory_bytes": node.device.memory_bytes * node.count // count,
            "bandwidth_bytes_per_s": node.device.bandwidth_bytes_per_s * node.count / count,
        }
    )
    shared = node.model_copy(update={"device": device, "count": count})
    return cluster.model_copy(update={"name": name, "nodes": (shared,)})


def check_here(cluster: Cluster) -> None:
    """Refuses a cluster that this machine is not: it can be planned for, but ranks cannot be started on it here."""
    nodes = sum(node.number for node in cluster.nodes)
    there = f"{nodes} nodes" if nodes > 1 else f"{cluster.devices} GPUs" if cluster.kind == "cuda" else "other CPUs"
    gpus, cores = torch.cuda.device_count(), usable_cores()
    fits = cluster.devices <= gpus if cluster.kind == "cuda" else cluster.cores <= cores
    if nodes > 1 or not fits:
        raise InputError(
            f"cluster '{cluster.name}' has {there}, this machine has {gpus} GPUs and {cores} cores: train with"
            " --cluster local, or start the ranks of several machines with torchrun"
        )
