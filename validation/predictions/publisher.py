"""Removes the sustained rates that one publisher measured: rates that a source published of its own machines must not
help to predict the rows of that source."""

from meshwright.cluster.cluster import Cluster, Device


def without_publisher(cluster: Cluster, publisher: str) -> Cluster:
    """The cluster whose devices have no sustained rate of this publisher."""
    nodes = tuple(node.model_copy(update={"device": _device_without(node.device, publisher)}) for node in cluster.nodes)
    return cluster.model_copy(update={"nodes": nodes})


def _device_without(device: Device, publisher: str) -> Device:
    shares = {
        dtype: {name: share for name, share in by_publisher.items() if name != publisher}
        for dtype, by_publisher in device.sustained_shares.items()
    }
    return device.model_copy(update={"sustained_shares": shares})
