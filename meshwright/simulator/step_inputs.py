"""`StepInputs`: everything that the prediction of a step's time depends on, except the profile of the model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.cluster.cluster import Cluster, Device, Node
from meshwright.dtypes import Dtype
from meshwright.plan import Plan
from meshwright.profile.optimizer import OptimizerCost
from meshwright.simulator.compute.operator_time import DeviceSpeeds, device_speeds
from meshwright.simulator.compute.passes import product_dtype
from meshwright.simulator.context import ContextExchange
from meshwright.simulator.runtime import Runtime
from meshwright.simulator.tensor.messages import TensorMessage


class RankDevice(NamedTuple):
    """The device of a rank, its speeds with the CPU cores that the rank has, and the `StepInputs.links` of it."""

    device: Device
    speeds: DeviceSpeeds
    links: Cluster | None = None


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a step's prediction. Every microbatch of a rank has `batch` samples. `device` is the slowest device
    of the ranks, and `speeds` are those of one rank on it. `branch_messages` are sent along the tensor axis in every
    microbatch; they are empty unless branches of the model are placed on different ranks. `context` says how ranks of
    the context axis exchange keys and values; `plan` and `batch` are then those of `without_context`. `stage_devices`
    are the devices of the pipeline ranks, if these are not alike. `links` is the cluster whose links the ranks of a
    tensor group use, if these all lie on one kind of node; None for the slowest links of all nodes. The rank holds
    `shard_part` of what the shard axis divides."""

    cluster: Cluster
    plan: Plan
    batch: float
    optimizer: OptimizerCost
    runtime: Runtime
    device: Device
    speeds: DeviceSpeeds
    branch_messages: tuple[TensorMessage, ...] = ()
    context: ContextExchange | None = None
    stage_devices: tuple[RankDevice, ...] = ()
    links: Cluster | None = None
    shard_part: float = 1.0

    def on_rank(self, pipeline_rank: int) -> "StepInputs":
        """The inputs with the device of this pipeline rank."""
        if not self.stage_devices:
            return self
        device, speeds, links = self.stage_devices[pipeline_rank]
        return replace(self, device=device, speeds=speeds, links=links)


def rate_of(node: Node, dtype: Dtype) -> float:
    """The rate of products in this dtype, or in fp32 if the device has none, of one of the node's ranks."""
    rates = node.device.rates
    cores = node.cores / node.count if node.device.kind == "cpu" else 1
    return cores * rates.get(dtype, rates.get("fp32", 0.0))


def slowest_node(nodes: Sequence[Node], plan: Plan) -> Node:
    """The node with the slowest device."""
    dtype = product_dtype(plan.numerics.precision)
    return min(nodes, key=lambda node: rate_of(node, dtype))


def rank_device(node: Node, plan: Plan, runtime: Runtime) -> RankDevice:
    """The device of a rank on this node, and its speeds with the CPU cores that one rank has."""
    dtype = product_dtype(plan.numerics.precision)
    cores = 1
    if node.device.kind == "cpu":
        cores = plan.compute.threads or max(1, node.cores // min(plan.world_size, node.count))
    device = node.device
    if device.rates.get(dtype, 0.0) < device.rates["fp32"] and device.kind == "cuda":
        # The device only emulates this dtype: libraries store tensors in it, but compute in fp32.
        device = device.model_copy(update={"rates": {**device.rates, dtype: device.rates["fp32"]}})
    speeds = device_speeds(device, dtype, cores, plan.compute.image_kernels, runtime.tf32_convolutions)
    return RankDevice(device, speeds)
