"""`PlanningInputs`: the inputs of a search for plans, such as the cluster, the batch and the optimizer. The model is
given separately, by its `Profiles`."""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Literal

from meshwright.cluster.cluster import Cluster, Device
from meshwright.dtypes import Dtype
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.plan_fields.constraints import NONE, Constraints
from meshwright.plan_fields.effects import Numerics
from meshwright.plan_rules.table import check_rules
from meshwright.profile.optimizer import OptimizerCost
from meshwright.simulator.compute.passes import product_dtype
from meshwright.simulator.predict import Prediction
from meshwright.simulator.runtime import OUR_RUNTIME, Runtime

# The share of a device's memory that a plan leaves free for what is not simulated, such as fragmentation and the
# workspaces of convolutions. This is a chosen value. `python -m validation` prints how many published runs are, with
# this margin, wrongly predicted not to fit, and how many runs that ran out of memory are predicted not to fit.
MARGIN = 0.08
TOP = 5
_LOWER_PRECISIONS: tuple[Dtype, ...] = ("bf16", "fp16")  # the preferred one first
_FULL = "fp32"

CheckPlan = Callable[[Plan], None]
"""Raises an `InputError` for a plan that the executor cannot run."""


class NoPlanFits(InputError):
    """No plan needs as little memory as a device has; or, without `lacks_memory`, there are no plans."""

    def __init__(self, message: str, lacks_memory: bool = True) -> None:
        super().__init__(message)
        self.lacks_memory = lacks_memory


@dataclass(frozen=True)
class PlanningInputs:
    """The inputs of a search for plans, apart from the model.

    allow             how much plans may change the numerical result, as the fields of a plan are marked (plan.py)
    even_shares       every data rank gets equally many samples of a batch; if False, some may get one more than others
    memory_margin     the share of a device's memory that is left free
    top               how many plans are ranked
    precisions        the precisions to try, instead of those that suit the device
    check_plan        raises an `InputError` for a plan that the executor cannot run; by default, that rules refuse
    compares_samples  the loss compares all samples of the global batch; a rank's share is therefore one microbatch
    epoch_samples     the number of samples in an epoch; None where it is not known
    offload           what plans keep in CPU memory (offload.py)
    checkpoint_copies  ranks keep a copy of the last checkpoint in CPU memory (`checkpoint.asynchronous`)
    can_fuse_optimizer  the optimizer has a fused implementation on these devices, and does not use it yet
    most_ranks        the largest number of devices that plans use; None for all
    constraints       what plans have to keep; set by `constrained` (constraints/apply.py)
    check_free_plan   `check_plan` without these constraints; None if there are none
    """

    cluster: Cluster
    global_batch: int
    optimizer: OptimizerCost
    allow: Numerics = "changes"
    even_shares: bool = True
    memory_margin: float = MARGIN
    top: int = TOP
    precisions: tuple[str, ...] = ()
    check_plan: CheckPlan = check_rules
    compares_samples: bool = False
    epoch_samples: int | None = None
    can_fuse_optimizer: bool = False
    offload: Literal["none", "optimizer", "parameters"] = "none"
    checkpoint_copies: bool = False
    most_ranks: int | None = None
    constraints: Constraints = NONE
    check_free_plan: CheckPlan | None = None

    @property
    def runtime(self) -> Runtime:
        """How the run executes plans, as far as it affects time and memory."""
        return OUR_RUNTIME.model_copy(update={"checkpoint_copies": self.checkpoint_copies})

    @property
    def device(self) -> Device:
        """The device with the least memory."""
        return min((node.device for node in self.cluster.nodes), key=lambda device: device.memory_bytes)

    def fastest_device(self, precision: str) -> Device:
        """The device with the highest rate in this precision."""
        dtype = product_dtype(precision)
        return max((node.device for node in self.cluster.nodes), key=lambda d: d.rates.get(dtype, d.rates["fp32"]))

    @property
    def capacity_bytes(self) -> int:
        """How many bytes of the memory of the smallest device a plan may use."""
        return self.capacity_of(self.device)

    @property
    def largest_capacity_bytes(self) -> int:
        """How many bytes of the memory of the largest device a plan may use."""
        return max(self.capacity_of(node.device) for node in self.cluster.nodes)

    def capacity_of(self, device: Device) -> int:
        """How many bytes of a device's memory a plan may use: all but the margin, or the limit of the constraints."""
        without_margin = int(device.memory_bytes * (1 - self.memory_margin))
        limit = self.constraints.max_memory
        return without_margin if limit is None else min(limit, without_margin)

    def fits(self, prediction: Prediction) -> bool:
        """Whether each rank needs no more memory than a plan may use of its device."""
        if not prediction.groups:
            return prediction.memory.device_bytes <= self.capacity_bytes
        return all(
            memory.device_bytes <= self.capacity_of(node.device)
            for group in prediction.groups
            for memory, node in zip(group.memory, group.group.nodes, strict=True)
        )

    @property
    def devices_per_node(self) -> int:
        """The largest number that divides the device count of every node. A tensor axis of this size, or of a divisor
        of it, stays within nodes."""
        return gcd(*(node.count for node in self.cluster.nodes))

    def precisions_to_try(self) -> tuple[str, ...]:
        """The precision that the constraints fix, if they do. Only fp32 unless plans may change the arithmetic; else
        `precisions` if given. Otherwise the first of bf16 and fp16 that all devices compute faster than fp32 (on CPUs
        also fp32, which may be faster for this model), or else tf32 or fp32."""
        fixed = self.constraints.fixed.get("numerics.precision")
        if fixed is not None:
            return (fixed,)
        excluded = {value for name, value in self.constraints.excluded if name == "numerics.precision"}
        if self.allow != "changes":
            return (_FULL,)
        if self.precisions:
            return self.precisions
        lower = next((dtype for dtype in _LOWER_PRECISIONS if dtype not in excluded and self._speeds_up(dtype)), None)
        if lower is None:
            has_tf32 = all(node.device.accelerates("tf32") for node in self.cluster.nodes)
            return ("tf32",) if has_tf32 and "tf32" not in excluded else (_FULL,)
        return (lower, _FULL) if self.device.kind == "cpu" else (lower,)

    def _speeds_up(self, dtype: Dtype) -> bool:
        devices = [node.device for node in self.cluster.nodes]
        return all(d.accelerates(dtype) and d.rates.get(dtype, 0.0) > d.rates.get("fp32", 0.0) for d in devices)


def fp32_image_kernels(inputs: PlanningInputs) -> list[dict[str, str]]:
    """What `compute_variants.py` tries for convolutions in fp32, in place of the default, as fields of `Compute`.
    NNPACK's kernels are only tried for ranks with one thread. With more, NNPACK's threads compete with those of
    OpenMP: on 16 Xeon cores, two ranks with eight threads each trained 240 samples of the mnist job per second, and one
    rank with one thread and oneDNN's kernels trained 720."""
    nodes = inputs.cluster.nodes
    has_one_thread = inputs.cluster.kind == "cpu" and all(node.cores <= node.count for node in nodes)
    nnpack = [{"convolutions": "nnpack"}] if has_one_thread else []
    return [{"layout": "channels_last"}, *nnpack]
