"""`Question`: what a plan is wanted for. The model comes beside it, in its profiles."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd

from meshwright.calibrate.model_operators import is_here, with_own_shapes
from meshwright.cluster.cluster import Cluster, Device
from meshwright.dtypes import Dtype
from meshwright.plan import Plan
from meshwright.planner.profiles import Profiles
from meshwright.profile.optimizer import OptimizerCost

MARGIN = 0.08  # of a device's memory, left free for what is not replayed: fragments, what convolutions try out
TOP = 5
_LOWER: tuple[Dtype, ...] = ("bf16", "fp16")  # in the order they are preferred
_EXACT = "fp32"

Refuses = Callable[[Plan], None]
"""Raises an `InputError` for a plan that cannot be run."""


def anything(_: Plan) -> None:
    """Refuses no plan."""


@dataclass(frozen=True)
class Question:
    """`exact` asks for plans that leave the numbers as they are. Where the batch is not `even`, ranks may get one
    sample more than others. `precisions` overrides what suits the hardware; `refuses` is what runs the plan. Where the
    loss compares all samples of the global batch (`joined`), a rank's share of it stays one microbatch."""

    cluster: Cluster
    global_batch: int
    optimizer: OptimizerCost
    exact: bool = False
    even: bool = True
    margin: float = MARGIN
    top: int = TOP
    precisions: tuple[str, ...] = ()
    refuses: Refuses = anything
    joined: bool = False
    samples: int | None = None  # in an epoch, where it is known

    @property
    def device(self) -> Device:
        """The smallest: ranks wait for each other, and hold equal shares."""
        return min((node.device for node in self.cluster.nodes), key=lambda device: device.memory_bytes)

    @property
    def capacity_bytes(self) -> int:
        """What a plan may fill of a device."""
        return int(self.device.memory_bytes * (1 - self.margin))

    @property
    def per_node(self) -> int:
        """The tensor axis stays within nodes: its size divides the devices of each."""
        return gcd(*(node.count for node in self.cluster.nodes))

    def precisions_to_try(self) -> tuple[str, ...]:
        """The lowest that the device has instructions for; on CPUs, where that may be slower, fp32 beside it."""
        if self.exact:
            return (_EXACT,)
        if self.precisions:
            return self.precisions
        lower = next((dtype for dtype in _LOWER if self._speeds_up(dtype)), None)
        if lower is None:
            return ("tf32",) if self.device.accelerates("tf32") else (_EXACT,)
        return (lower, _EXACT) if self.device.kind == "cpu" else (lower,)

    def _speeds_up(self, dtype: Dtype) -> bool:
        rates = self.device.rates
        return self.device.accelerates(dtype) and rates.get(dtype, 0.0) > rates.get("fp32", 0.0)


def with_own_operators(question: Question, profiles: Profiles) -> Question:
    """Where the cluster is this machine: with the model's own operators measured on it, of a rank that is one of as
    many replicas as there are devices. Any other question is left as it is."""
    cluster, devices = question.cluster, question.cluster.devices
    if not is_here(cluster):
        return question
    for precision in question.precisions_to_try():
        replicas = {"replicate": min(devices, question.global_batch)}
        plan = Plan.model_validate({"axes": replicas, "numerics": {"precision": precision}})
        cluster = with_own_shapes(cluster, profiles.get(precision, "none"), plan, question.global_batch)
    return replace(question, cluster=cluster)
