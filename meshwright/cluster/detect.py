"""Finds the cluster that a name describes: this machine, CPU ranks on it, devices of the catalog, or a file."""

from collections.abc import Callable

import torch

from meshwright.cluster.busy import is_idle_now
from meshwright.cluster.cache import calibrated_device, load_measured, save_measured
from meshwright.cluster.catalog import entry_reported_as, find_link
from meshwright.cluster.cluster import Cluster, Device, Link, Node
from meshwright.cluster.cores import usable_cores
from meshwright.cluster.file import is_file, load_cluster
from meshwright.cluster.gpus import list_gpus
from meshwright.cluster.names import cluster_from_name, parse_cluster_name
from meshwright.cluster.processor import memory_bytes, read_processor
from meshwright.errors import InputError

Measure = Callable[[Cluster], Cluster]


def find_cluster(name: str, measure: Measure | None = None) -> Cluster:
    """Returns the cluster with this name. `local` is every GPU of this machine or, without GPUs, one CPU device per
    usable core; `3xcpu` is three CPU devices that share all usable cores; other names are catalog devices, joined by
    `+` if they are not alike, or YAML files.

    With `measure` (`probe.measure_machine`), this machine is measured if the cache has no earlier measurement, or one
    that other programs disturbed and they have ended. Without `measure`, an earlier measurement is used if there is
    one; otherwise the cluster has only the constants that can be detected or are in the catalog.
    """
    if is_file(name):
        return load_cluster(name)
    if "+" in name:
        return cluster_from_name(name)
    counts, word, links = parse_cluster_name(name)
    if word.lower() == "local":
        if counts or links:
            raise InputError(
                f"cluster '{name}' is not known: local is this machine with all its devices, write 'local', or '2xcpu'"
                " for two CPU ranks on it"
            )
        return _measured(detect(), measure)
    if word.lower() == "cpu":
        if len(counts) > 1 or links:
            raise InputError(f"cluster '{name}' is not known: cpu is a core of this machine, write '3xcpu' for three")
        return with_shared_cores(_measured(detect_cpu(), measure), counts[0] if counts else 1, name)
    return cluster_from_name(name)


def detect() -> Cluster:
    """Returns this machine as detected, without any measurement."""
    return _detect_gpus(torch.cuda.device_count()) if torch.cuda.device_count() else detect_cpu()


def detect_cpu() -> Cluster:
    """Returns this machine's usable cores, each as a device with its share of the memory, without any measurement."""
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
    """Returns this machine's GPUs. If the catalog has the name that the driver reports, the GPUs have the catalog's
    constants; otherwise only their memory is known until they are measured."""
    gpus = list_gpus()
    gpu = min(gpus, key=lambda gpu: gpu.memory_bytes) if gpus else None
    entry = entry_reported_as(gpu.name) if gpu else None
    if entry:
        node = _gpu_node(entry.device, count, find_link(entry.within))
        return Cluster(name="local", nodes=(node,), based_on="datasheet")
    device = Device(
        name=gpu.name if gpu else "GPU",
        kind="cuda",
        memory_bytes=gpu.memory_bytes if gpu else 0,
        sources={"memory_bytes": "detected: nvidia-smi"} if gpu else {},
    )
    node = _gpu_node(device, count, Link(name="unknown"))
    return Cluster(name="local", nodes=(node,), based_on="detected")


def _gpu_node(device: Device, count: int, link: Link) -> Node:
    """This machine with its GPUs."""
    return Node(device=device, count=count, link=link, cores=usable_cores(), host_memory_bytes=memory_bytes())


def _measured(detected: Cluster, measure: Measure | None) -> Cluster:
    cluster = load_measured(detected)
    if cluster is None or (cluster.busy_cores and measure is not None and is_idle_now()):
        if measure is None:
            return detected
        cluster = measure(detected)
        save_measured(detected, cluster)
    return _calibrated(cluster)


def _calibrated(cluster: Cluster) -> Cluster:
    """Returns the cluster with its device replaced by the one that `doctor --calibrate` saved, or the same cluster if
    none was saved. The memory of the device is not replaced, because it is the device's share of this machine's."""
    (node,) = cluster.nodes
    calibrated = calibrated_device(node.device.name)
    if calibrated is None or calibrated.kind != node.device.kind:
        return cluster
    device = calibrated.model_copy(update={"memory_bytes": node.device.memory_bytes})
    return cluster.model_copy(update={"nodes": (node.model_copy(update={"device": device}),), "based_on": "calibrated"})


def with_shared_cores(cluster: Cluster, count: int, name: str) -> Cluster:
    """Returns `count` CPU devices on the same cores, each with its share of the machine's memory and bandwidth."""
    (node,) = cluster.nodes
    device = node.device.model_copy(
        update={
            "memory_bytes": node.device.memory_bytes * node.count // count,
            "bandwidth_bytes_per_s": node.device.bandwidth_bytes_per_s * node.count / count,
        }
    )
    shared = node.model_copy(update={"device": device, "count": count})
    return cluster.model_copy(update={"name": name, "nodes": (shared,)})


def check_is_local(cluster: Cluster) -> None:
    """Raises `InputError` if the ranks of the cluster cannot be started on this machine: the cluster has several nodes,
    more GPUs than this machine, or CPU ranks that share more cores than this machine has."""
    nodes = sum(node.number for node in cluster.nodes)
    devices = f"{cluster.device_count} GPUs" if cluster.kind == "cuda" else "other CPUs"
    hardware = f"{nodes} nodes" if nodes > 1 else devices
    gpus, cores = torch.cuda.device_count(), usable_cores()
    fits = cluster.device_count <= gpus if cluster.kind == "cuda" else cluster.cores <= cores
    if nodes > 1 or not fits:
        raise InputError(
            f"cluster '{cluster.name}' has {hardware}, this machine has {gpus} GPUs and {cores} cores: train with"
            " --cluster local, or on several machines with --nodes (docs/launch.md)"
        )
