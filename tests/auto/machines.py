"""A cluster of CPU devices with fixed rates, so that tests of planning measure nothing."""

from meshwright.cluster.cache import save_measured
from meshwright.cluster.cluster import Cluster, Device, Link, Node
from meshwright.cluster.detect import detect_cpu


def cpu_cluster(devices: int, *, rate: float = 5e10, bandwidth_bytes_per_s: float = 1e10) -> Cluster:
    """Returns one machine with so many CPU devices of this rate and bandwidth, as if they had been measured."""
    device = Device(
        name="test core",
        kind="cpu",
        memory_bytes=2**33,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        rates={"fp32": rate},
        launch_s=1e-5,
        sources={},
    )
    link = Link(name="Loopback", bandwidth_bytes_per_s=1e9, latency_s=1e-4)
    return Cluster(
        name=f"{devices}xcpu",
        nodes=(Node(device=device, count=devices, link=link, cores=devices),),
        based_on="measured",
    )


def store_measurement() -> None:
    """Stores fixed rates of this machine's cores, so that no test of a command measures them, which takes 10 s."""
    detected = detect_cpu()
    cluster = cpu_cluster(detected.device_count)
    (node,) = cluster.nodes
    device = node.device.model_copy(update={"rates": {"fp64": 2.5e10, "fp32": 5e10, "bf16": 1e10, "fp16": 1e10}})
    node = node.model_copy(update={"device": device})
    save_measured(detected, cluster.model_copy(update={"name": "local", "nodes": (node,)}))
