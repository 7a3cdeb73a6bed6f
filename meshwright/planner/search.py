"""Which plan to train with. So far: every device a replica."""

from meshwright.plan import Axes, Plan


def best_plan(devices: int, global_batch: int) -> Plan:
    """Replicates over as many devices as the global batch can feed."""
    return Plan(axes=Axes(replicate=min(devices, global_batch)))
