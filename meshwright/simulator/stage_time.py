"""Seconds of one microbatch on one pipeline stage (a model without a pipeline is one stage).

compute     = operators of both passes + adding the gradients to those of earlier microbatches   _accumulate_s
tensor      = tensor-parallel messages, less the part that hides behind compute                  _stage_time
shard       = what gathering weights and scattering gradients adds to both passes                _shard_s
launch      = what the host needs beyond all of the device's work; on CPU ranks, the runtime's
              orchestration                                                              _orchestration_s
"""

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.profile.values import ModelProfile
from meshwright.simulator.communication.collectives import collective_launch_s, overlap
from meshwright.simulator.communication.exchange import gradient_exchange, messages_s
from meshwright.simulator.communication.placement import axis_groups
from meshwright.simulator.compute.passes import operator_launch_s, pass_s
from meshwright.simulator.pipeline.stages import StageProfile
from meshwright.simulator.step_inputs import StepInputs
from meshwright.simulator.tensor.messages import TensorMessage, tensor_messages

_FP32_BYTES = 4


@dataclass(frozen=True)
class StageTime:
    """Seconds of one microbatch on one stage, by what they are spent on."""

    forward_s: float
    backward_s: float
    launch_s: float
    tensor_forward_s: float
    tensor_backward_s: float
    shard_s: float

    @property
    def forward_pass_s(self) -> float:
        """Compute and communication of the forward pass. A backward pass has twice as many products, so a third of the
        seconds that are predicted for both passes together belong to the forward pass."""
        return self.forward_s + self.tensor_forward_s + self.launch_s / 3 + self.shard_s / 3

    @property
    def backward_pass_s(self) -> float:
        return self.backward_s + self.tensor_backward_s + self.launch_s * 2 / 3 + self.shard_s * 2 / 3


def stage_times(
    whole_stages: Sequence[StageProfile], rank_stages: Sequence[StageProfile], inputs: StepInputs
) -> list[StageTime]:
    """The time of each stage: `whole_stages` are those of the whole model, `rank_stages` one rank's share of them.
    Equal stages are priced once."""
    priced: dict[object, StageTime] = {}
    times = []
    for whole, local in zip(whole_stages, rank_stages, strict=True):
        weights_bytes = sum(parameter.bytes for parameter in local.profile.parameters)
        key = (weights_bytes, *((s.phase, s.block_count, s.operators) for s in local.profile.segments))
        if key not in priced:
            priced[key] = _stage_time(whole.profile, local.profile, weights_bytes, inputs)
        times.append(priced[key])
    return times


def _stage_time(whole: ModelProfile, local: ModelProfile, weights_bytes: float, inputs: StepInputs) -> StageTime:
    plan, cluster, runtime = inputs.plan, inputs.cluster, inputs.runtime
    tf32 = local.precision == "tf32"
    forward_s, forward_operators = pass_s(local, "forward", inputs.batch, inputs.speeds, tf32)
    backward_s, backward_operators = pass_s(local, "backward", inputs.batch, inputs.speeds, tf32)
    backward_s += _accumulate_s(local, inputs)
    along_tensor, along_replicate = tensor_messages(whole, plan, inputs.batch, runtime)
    along_tensor += inputs.branch_messages
    groups = axis_groups(plan.axes, cluster)
    tensor_forward_s, tensor_backward_s = (
        (1 - runtime.tensor_overlap)
        * (
            messages_s(along_tensor, groups["tensor"], cluster, forward)
            + messages_s(along_replicate, groups["replicate"], cluster, forward)
        )
        for forward in (True, False)
    )
    messages = (*along_tensor, *along_replicate)
    launch_s = 0.0
    if inputs.device.kind == "cuda":
        operators_s = (forward_operators + backward_operators) * operator_launch_s(inputs.device)
        launch_s = operators_s + sum(message.times for message in messages) * collective_launch_s(cluster)
    device_s = forward_s + backward_s + tensor_forward_s + tensor_backward_s
    return StageTime(
        forward_s,
        backward_s,
        runtime.host_wait_s(launch_s, device_s) + _orchestration_s(local, messages, inputs),
        tensor_forward_s,
        tensor_backward_s,
        _shard_s(weights_bytes, len(local.blocks), forward_s, backward_s, inputs),
    )


def _accumulate_s(local: ModelProfile, inputs: StepInputs) -> float:
    """Seconds of adding up gradients, averaged over the microbatches: the gradients of the first one are not added to
    anything. Where gradients are scattered after each microbatch, a rank adds up its shard of them."""
    plan = inputs.plan
    # A pipeline scatters them after the last microbatch.
    scatters_each = plan.memory.sharding != "optimizer" and plan.axes.pipeline == 1
    parts = plan.axes.shard if scatters_each else 1
    weights = sum(p.bytes for p in local.parameters if p.trainable) / _FP32_BYTES / parts
    added_share = 1 - 1 / plan.microbatches
    return added_share * inputs.runtime.accumulate_bytes_per_weight * weights / inputs.speeds.bandwidth_bytes_per_s


def _orchestration_s(local: ModelProfile, messages: Sequence[TensorMessage], inputs: StepInputs) -> float:
    """Seconds that a CPU rank spends in a microbatch on units of sharded weights, messages and stages; 0 on a GPU,
    whose host does this while the device computes."""
    if inputs.device.kind != "cpu":
        return 0.0
    plan, work = inputs.plan, inputs.runtime.orchestration
    units = (len(local.blocks) + 1) * (plan.axes.shard > 1)
    message_count, has_stages = sum(message.times for message in messages), plan.axes.pipeline > 1
    return inputs.device.launch_s * (work.unit * units + work.message * message_count + work.stage * has_stages)


def _shard_s(weights_bytes: float, blocks: int, forward_s: float, backward_s: float, inputs: StepInputs) -> float:
    """Seconds that the shard axis adds to both passes of a microbatch: of each pass the first piece in full, and what
    does not hide behind compute of the others."""
    plan, runtime = inputs.plan, inputs.runtime
    if plan.axes.shard == 1 or plan.memory.sharding == "optimizer":
        return 0.0
    exchange = gradient_exchange(weights_bytes, blocks, plan, inputs.cluster, runtime)
    gather_s = exchange.gather_s if plan.memory.sharding == "parameters" else 0.0
    added_s = 0.0
    for compute_s, exchange_s in ((forward_s, gather_s), (backward_s, gather_s + exchange.scatter_s)):
        first_s = exchange_s / exchange.pieces
        hidden = overlap(compute_s * runtime.gather_overlap, exchange_s - first_s, inputs.device.kind)
        added_s += first_s + hidden.exposed_s
    return added_s
