"""A cluster of CPU devices for planning that is not measured, and that no test has to measure."""

from meshwright.cluster.cluster import Cluster, Device, Link, Node


def cpu_cluster(devices: int, *, rate: float = 5e10, bandwidth_bytes_per_s: float = 1e10) -> Cluster:
    """So many CPU devices in one machine, which are known to be as fast as given."""
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
