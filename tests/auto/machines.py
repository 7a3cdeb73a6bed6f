"""A cluster of CPU devices with fixed rates, so that tests of planning measure nothing."""

from meshwright.cluster.cluster import Cluster, Device, Link, Node


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
