"""`StepInputs`: everything that the prediction of a step's time depends on, except the profile of the model."""

from dataclasses import dataclass

from meshwright.cluster.cluster import Cluster, Device
from meshwright.plan import Plan
from meshwright.profile.optimizer import OptimizerCost
from meshwright.simulator.compute.operator_time import DeviceSpeeds, device_speeds
from meshwright.simulator.compute.passes import product_dtype
from meshwright.simulator.context import ContextExchange
from meshwright.simulator.runtime import Runtime
from meshwright.simulator.tensor.messages import TensorMessage


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a step's prediction. Every microbatch of a rank has `batch` samples. `device` is the slowest device
    of the cluster, and `speeds` are those of one rank on it. `branch_messages` are sent along the tensor axis in every
    microbatch; they are empty unless branches of the model are placed on different ranks. `context` says how ranks of
    the context axis exchange keys and values; `plan` and `batch` are then those of `without_context`."""

    cluster: Cluster
    plan: Plan
    batch: float
    optimizer: OptimizerCost
    runtime: Runtime
    device: Device
    speeds: DeviceSpeeds
    branch_messages: tuple[TensorMessage, ...] = ()
    context: ContextExchange | None = None


def slowest_device(cluster: Cluster, plan: Plan, runtime: Runtime) -> tuple[Device, DeviceSpeeds]:
    """The slowest device of the cluster, and its speeds with the CPU cores that one rank has."""
    dtype = product_dtype(plan.numerics.precision)
    node = min(cluster.nodes, key=lambda node: node.device.rates.get(dtype, node.device.rates.get("fp32", 0.0)))
    cores = 1
    if node.device.kind == "cpu":
        cores = plan.compute.threads or max(1, node.cores // min(plan.world_size, node.count))
    device = node.device
    if device.rates.get(dtype, 0.0) < device.rates["fp32"] and device.kind == "cuda":
        # The device only emulates this dtype: libraries store tensors in it, but compute in fp32.
        device = device.model_copy(update={"rates": {**device.rates, dtype: device.rates["fp32"]}})
    return device, device_speeds(device, dtype, cores, plan.compute.image_kernels, runtime.tf32_convolutions)
