"""What `plan.memory.offload` costs and saves on GPUs. On CPU ranks everything is in CPU memory under any plan, and the
field changes nothing (`offload_of`). T and W are the bytes of a rank's trained and of all its parameters, after the
tensor and pipeline axes, n is the size of the shard axis.

    copies     = bytes / bandwidth between the device and CPU memory                             copy_s
    optimizer    weights and gradients to the CPU, weights back: 3 T / n, once a step            optimizer_copies_s
    parameters   W / n to the device in each pass that gathers, T / n back in each that scatters stage_time.py
    step       = traffic of the optimizer / bandwidth of the rank's cores × slowdown             host_step_s

Copies of `optimizer` hide behind nothing: the step needs all gradients, and the next forward pass the new weights.
Those of `parameters` hide behind compute as the communication of shards does. These terms have not been compared with
measured steps yet: none of the published runs that we have offloads.
"""

from math import inf
from typing import Literal

from meshwright.cluster.catalog import find_entry
from meshwright.cluster.cluster import Cluster, Device, DeviceKind
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.profile.optimizer import OptimizerCost

# How much longer a step of several operators per tensor takes on CPU cores than a fused one, by numbers of state per
# weight. From one short run with torch 2.13 on two Neoverse-N1 cores that other programs used, too, 20 million weights:
# AdamW 297 against 106 ms, SGD with momentum 84 against 42 ms; plain SGD gains nothing.
_UNFUSED_SLOWDOWN = {0: 1.0, 1: 2.0, 2: 2.8}


def offload_of(plan: Plan, kind: DeviceKind) -> Literal["none", "optimizer", "parameters"]:
    """What a rank keeps in CPU memory in place of the memory of its device."""
    return plan.memory.offload if kind == "cuda" else "none"


def copy_s(size_bytes: float, device: Device) -> float:
    """Seconds of copies between the device and CPU memory."""
    if not device.host_bandwidth_bytes_per_s:
        raise InputError(
            f"the plan keeps tensors in CPU memory (memory.offload), but the bandwidth between a {device.name} and CPU"
            " memory is not known: give host_bandwidth_bytes_per_s of the device in the cluster's file, or set"
            " memory.offload to none"
        )
    return size_bytes / device.host_bandwidth_bytes_per_s


def optimizer_copies_s(trained_bytes: float, device: Device) -> float:
    """Seconds of copying the weights and gradients that a rank updates to CPU memory, and the weights back."""
    return 3 * copy_s(trained_bytes, device)


def host_bandwidth(plan: Plan, cluster: Cluster) -> float:
    """Bytes per second that the CPU cores of one rank read and write, on the node with the fewest per device. The
    bandwidth of a core is that of the catalog's `Core`."""
    cores = min(node.cores / min(node.count, plan.world_size) for node in cluster.nodes)
    return find_entry("Core").device.bandwidth_bytes_per_s * max(1.0, min(plan.compute.threads or inf, cores))


def host_step_s(trained_bytes: float, optimizer: OptimizerCost, plan: Plan, cluster: Cluster) -> float:
    """Seconds of the optimizer's step on the CPU cores of a rank. Without an optimizer it takes no time."""
    if not optimizer.state_ratio and not optimizer.traffic_ratio and not optimizer.multi_tensor:
        return 0.0
    slowdown = 1.0 if optimizer.is_fused else _UNFUSED_SLOWDOWN[min(2, round(optimizer.state_ratio))]
    return trained_bytes * (3 + 2 * optimizer.state_ratio) * slowdown / host_bandwidth(plan, cluster)


def host_bytes(plan: Plan, weights_bytes: float, trained_bytes: float, optimizer: OptimizerCost) -> float:
    """Bytes of CPU memory that a rank on a GPU needs for what the plan keeps there. `weights_bytes` and `trained_bytes`
    are those of a rank's shards."""
    state = trained_bytes * optimizer.state_ratio
    if plan.memory.offload == "optimizer":
        return state + 2 * trained_bytes  # copies of weights and gradients
    return state + weights_bytes + trained_bytes if plan.memory.offload == "parameters" else 0.0
