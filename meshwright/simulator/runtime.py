"""`Runtime`: what the program that executes a plan does in addition to the arithmetic of the model. The values here are
those of this package; other modules of the simulator call a `Runtime` wherever another program could act differently.

A validation that predicts measurements of another program passes a subclass which overrides these methods.
"""

from dataclasses import dataclass
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, NonNegativeFloat

from meshwright.cluster.cluster import Collective
from meshwright.plan import Algorithm, Plan
from meshwright.profile.optimizer import OptimizerCost
from meshwright.profile.values import ModelProfile
from meshwright.simulator.compute.executed_profile import executed_profile
from meshwright.simulator.memory.device_memory import DeviceMemory


class Orchestration(BaseModel):
    """Work of a CPU rank in every microbatch in addition to computing, counted in operators that the core could launch
    in that time: for each unit of sharded parameters, for each tensor-parallel message, and for a pipeline stage."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    unit: NonNegativeFloat = 0.0
    message: NonNegativeFloat = 0.0
    stage: NonNegativeFloat = 0.0


@dataclass(frozen=True)
class ParameterExchange:
    """How gradients and weights are communicated under a plan. `gradient_share` and `weight_share` are the bytes sent
    for each byte of an fp32 parameter. Gradients of a parameter that several pipeline stages use are summed as
    1 / `tied_parts` of the tensor on each rank."""

    gradient_share: float
    weight_share: float
    tied_parts: int
    replicate_algorithm: Algorithm
    shard_collective: Collective


@dataclass(frozen=True)
class CutTransfer:
    """Bytes that one tensor rank sends over a pipeline cut, and the bytes of the tensor that the ranks of the tensor
    axis all-gather before they send it or after they received it (0 where none is gathered)."""

    sent_bytes: float
    gathered_before_bytes: float
    gathered_behind_bytes: float


class MemoryInputs(NamedTuple):
    """What the memory of a rank is predicted from."""

    profile: ModelProfile
    optimizer: OptimizerCost
    device: DeviceMemory


class Runtime(BaseModel):
    """Our runtime. The three `..._overlap` values are the share of a pass behind which communication can hide: that of
    gradients, of all-gathered weights, and of tensor-parallel messages. Adding up the gradients of one more microbatch
    moves `accumulate_bytes_per_weight` (12: two fp32 numbers are read, one is written). With `waits_for_sends` a stage
    continues only when the tensor that it sent has arrived. `tf32_convolutions`: fp32 convolutions run in tf32."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Seconds of the process of steps under each plan, less those of one rank, divided by the 20 µs in which a core
    # launched an operator: 180 to 330 a unit, 55 to 80 a message and 150 to 250 a stage, for tests/zoo.py's gpt and
    # multitask models on two Neoverse cores. `python -m validation.host_costs` measures them again; on 16 x86 cores
    # (12 µs an operator) it printed 390 a unit, 71 a message and 170 a stage, for a decoder of four blocks.
    orchestration: Orchestration = Orchestration(unit=200, message=70, stage=170)
    tf32_convolutions: bool = False  # parallel/precision.py turns them off
    accumulate_bytes_per_weight: NonNegativeFloat = 12.0
    gradient_overlap: NonNegativeFloat = 1.0
    gather_overlap: NonNegativeFloat = 1.0
    tensor_overlap: NonNegativeFloat = 0.0
    waits_for_sends: bool = False

    def executed_profile(self, profile: ModelProfile) -> ModelProfile:
        """The profile with the operators that are executed, whose time is to be predicted."""
        return executed_profile(profile)

    def padded_profile(self, profile: ModelProfile) -> ModelProfile:
        """The profile of one rank with the sizes that its products are padded to."""
        return profile

    def memory_inputs(
        self, profile: ModelProfile, plan: Plan, optimizer: OptimizerCost, device: DeviceMemory
    ) -> MemoryInputs:
        """The profile, optimizer and device that say which bytes are in memory."""
        return MemoryInputs(profile, optimizer, device)

    def parameter_exchange(self, plan: Plan) -> ParameterExchange:
        """How gradients are combined and weights gathered: in fp32, with the plan's algorithm."""
        return ParameterExchange(1.0, 1.0, plan.axes.shard, plan.gradients.algorithm, "reduce_scatter")

    def cut_transfer(self, size_bytes: float, plan: Plan) -> CutTransfer:
        """What a tensor of `size_bytes` that crosses a pipeline cut costs: every tensor rank sends all of it. A tensor
        that is divided along the sequence is all-gathered before."""
        gathers = plan.modules.sequence and plan.axes.tensor > 1
        return CutTransfer(size_bytes, size_bytes if gathers else 0.0, 0.0)

    def resends_messages(self, plan: Plan) -> bool:
        """Whether the backward pass of a recomputed block sends the tensor-parallel messages of its forward pass again.
        Ours does, since selective recomputation too recomputes everything between the products."""
        return plan.memory.recompute != "none"

    def host_wait_s(self, launch_s: float, device_s: float = 0.0) -> float:
        """Seconds that a device waits for its host, which needs `launch_s` to start work that takes the device
        `device_s`: the host runs ahead of the device."""
        return max(0.0, launch_s - device_s)


OUR_RUNTIME = Runtime()
