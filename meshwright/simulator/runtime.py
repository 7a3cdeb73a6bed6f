"""`Runtime`: how the program that executes a plan behaves, as far as it affects time and memory. The defaults describe
this package. Other modules of the simulator call a `Runtime` wherever another training program could act differently.

To predict measurements of another program, validation passes a subclass that overrides these methods.
"""

from dataclasses import dataclass
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, NonNegativeFloat

from meshwright.cluster.cluster import Collective
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Algorithm
from meshwright.profile.optimizer import OptimizerCost
from meshwright.profile.values import ModelProfile
from meshwright.simulator.compute.executed_profile import casts_weights, executed_profile
from meshwright.simulator.compute.float8 import float8_profile, linear_layers
from meshwright.simulator.memory.device_memory import DeviceMemory


class Orchestration(BaseModel):
    """Work of a CPU rank in every microbatch beside the operators of the model, counted in operators that the core
    could launch in that time: per `unit` of sharded parameters (a block, or all parameters outside of blocks), per
    tensor-parallel `message`, and per pipeline `stage`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    unit: NonNegativeFloat = 0.0
    message: NonNegativeFloat = 0.0
    stage: NonNegativeFloat = 0.0


@dataclass(frozen=True)
class ParameterExchange:
    """How gradients and weights are communicated under a plan. `gradient_share` and `weight_share` are the bytes of a
    gradient or weight in the dtype in which it is sent, per byte of the fp32 parameter. When the gradients of a
    parameter that several pipeline stages use are summed, each rank sums 1 / `tied_parts` of the tensor.
    `replicate_algorithm` combines gradients over the replicate axis, `shard_collective` over the shard axis."""

    gradient_share: float
    weight_share: float
    tied_parts: int
    replicate_algorithm: Algorithm
    shard_collective: Collective


@dataclass(frozen=True)
class CutTransfer:
    """The bytes that one rank of the tensor axis sends over a pipeline cut, and the bytes of the whole tensor that the
    ranks of the tensor axis all-gather before the cut or behind it (0 if it is not gathered there)."""

    sent_bytes: float
    gathered_before_bytes: float
    gathered_behind_bytes: float


class MemoryInputs(NamedTuple):
    """The profile, the optimizer's cost and the device's memory properties from which `predict_memory` predicts."""

    profile: ModelProfile
    optimizer: OptimizerCost
    device: DeviceMemory


class Runtime(BaseModel):
    """How a training program executes plans; the defaults are those of this package. `gradient_overlap` and
    `gather_overlap` are the shares of a pass behind which the communication of gradients and of all-gathered weights
    can hide; `tensor_overlap` is the share of tensor-parallel messages that is hidden. Adding the gradients of one more
    microbatch moves `accumulate_bytes_per_weight` (12: two fp32 numbers are read, one is written). `routed_share` is
    the share of the bytes of all routed rows that ranks send to experts. With `waits_for_sends` a stage continues only
    when the tensor that it sent has arrived. `tf32_convolutions`: fp32 convolutions run in tf32. With
    `checkpoint_copies` ranks keep a copy of the last checkpoint in CPU memory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Measured as the CPU seconds of a process in steps under a plan with the axis, less those of a plan with one rank,
    # divided by the 20 µs in which a core launched an operator: 180 to 330 per unit, 55 to 80 per message and 150 to
    # 250 per stage, for tests/zoo.py's gpt and multitask models on two Neoverse cores. `python -m
    # validation.host_costs` measures them again; on 16 x86 cores (12 µs per operator) it printed 390 per unit, 71 per
    # message and 170 per stage, for a decoder of four blocks.
    orchestration: Orchestration = Orchestration(unit=200, message=70, stage=170)
    tf32_convolutions: bool = False  # parallel/precision.py turns them off
    accumulate_bytes_per_weight: NonNegativeFloat = 12.0
    gradient_overlap: NonNegativeFloat = 1.0
    gather_overlap: NonNegativeFloat = 1.0
    tensor_overlap: NonNegativeFloat = 0.0
    routed_share: NonNegativeFloat = 1.0
    waits_for_sends: bool = False
    checkpoint_copies: bool = False

    def executed_profile(self, profile: ModelProfile) -> ModelProfile:
        """The profile with only those operators that this program executes, from which time is predicted."""
        return executed_profile(profile)

    def float8_profile(self, profile: ModelProfile) -> ModelProfile:
        """The profile of one rank with the products that this program computes in 8 bits under `precision: fp8`."""
        return float8_profile(profile, linear_layers(profile))

    def padded_profile(self, profile: ModelProfile) -> ModelProfile:
        """The profile of one rank with the sizes to which the program pads matrix products; ours pads none."""
        return profile

    def weights_on_tensor_ranks(self, profile: ModelProfile) -> ModelProfile:
        """The profile without weights of which each rank of the tensor axis has other ones, whose gradients are not
        summed over the axis; ours has none beside those of split layers."""
        return profile

    def memory_inputs(
        self, profile: ModelProfile, plan: Plan, optimizer: OptimizerCost, device: DeviceMemory
    ) -> MemoryInputs:
        """The inputs of the memory prediction for this program; for ours, the arguments unchanged."""
        return MemoryInputs(profile, optimizer, device)

    def parameter_exchange(self, plan: Plan) -> ParameterExchange:
        """How gradients are combined, in fp32 and with the plan's algorithm; and how weights are gathered: in fp32, or
        in half precision if they are cast before."""
        weight_share = 0.5 if casts_weights(plan) else 1.0
        return ParameterExchange(1.0, weight_share, plan.axes.shard, plan.gradients.algorithm, "reduce_scatter")

    def cut_transfer(self, size_bytes: float, plan: Plan) -> CutTransfer:
        """What ranks send and gather for a tensor of `size_bytes` that crosses a pipeline cut. Every rank of the tensor
        axis sends the whole tensor. A tensor that is divided along the sequence is all-gathered before the cut."""
        gathers = plan.modules.sequence and plan.axes.tensor > 1
        return CutTransfer(size_bytes, size_bytes if gathers else 0.0, 0.0)

    def resends_messages(self, plan: Plan) -> bool:
        """Whether the backward pass of a recomputed block sends the tensor-parallel messages of its forward pass again.
        Ours does, also with selective recomputation, which recomputes everything between the products."""
        return plan.memory.recompute != "none"

    def splits_backward(self, plan: Plan) -> bool:
        """Whether a schedule that computes the gradients of weights after those of inputs (zero_bubble, zbv) does so
        under this plan. Ours runs the whole backward pass at once if blocks are recomputed or compiled, because both
        would run twice in two parts (parallel/pipeline/pipeline.py)."""
        return plan.memory.recompute == "none" and plan.compute.compile == "none"

    def host_wait_s(self, launch_s: float, device_s: float = 0.0) -> float:
        """Seconds that a device waits for its host in total. The host needs `launch_s` to launch work that keeps the
        device busy for `device_s`. Because the host launches ahead of the device, the device waits only for the
        excess."""
        return max(0.0, launch_s - device_s)


OUR_RUNTIME = Runtime()
