"""Seconds of one microbatch on one pipeline stage (a model without a pipeline is one stage).

compute     = operators of both passes + adding the gradients to those of earlier microbatches   _accumulate_s
tensor      = tensor-parallel messages, less the part that hides behind compute                  _stage_time
shard       = what gathering weights and scattering gradients adds to both passes                _shard_s
expert      = tokens that go to the experts of other ranks and back                              _stage_time
context     = what the exchange of keys and values adds to both passes                           context.py
launch      = on GPUs, the seconds by which the host's launches take longer than the device      _stage_time
              on CPU ranks, the work of the runtime beside the operators                         _orchestration_s
"""

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.profile.values import ModelProfile, Phase
from meshwright.simulator.communication.collectives import collective_launch_s, overlap
from meshwright.simulator.communication.exchange import gradient_exchange, messages_s
from meshwright.simulator.communication.placement import axis_groups
from meshwright.simulator.compute.host_work import changes_host_work, host_launches, removed_gaps_s
from meshwright.simulator.compute.passes import operator_launch_s, pass_s
from meshwright.simulator.context import attention_exchange_s
from meshwright.simulator.experts import expert_group, expert_messages, gathered_bytes
from meshwright.simulator.offload import copy_s, host_bandwidth, offload_of
from meshwright.simulator.pipeline.order import stages_of_rank
from meshwright.simulator.pipeline.stages import StageProfile
from meshwright.simulator.step_inputs import StepInputs
from meshwright.simulator.tensor.messages import TensorMessage, tensor_messages

_FP32_BYTES = 4
_PHASES: tuple[Phase, Phase] = ("forward", "backward")


@dataclass(frozen=True)
class StageTime:
    """Seconds of one microbatch on one stage. `forward_s` and `backward_s` are compute, `launch_s` is waiting for the
    host, `tensor_forward_s` and `tensor_backward_s` are tensor-parallel messages, and `shard_s` is what gathering
    weights and scattering gradients adds to both passes. `expert_forward_s` and `expert_backward_s` are sending tokens
    to the experts of other ranks and back, which nothing hides. `context_forward_s` and `context_backward_s` are what
    the exchange of keys and values adds."""

    forward_s: float
    backward_s: float
    launch_s: float
    tensor_forward_s: float
    tensor_backward_s: float
    shard_s: float
    expert_forward_s: float = 0.0
    expert_backward_s: float = 0.0
    context_forward_s: float = 0.0
    context_backward_s: float = 0.0

    @property
    def forward_pass_s(self) -> float:
        """Seconds of compute, launches and communication of the forward pass. `launch_s` and `shard_s` are predicted
        for both passes together. A third of them is counted as the forward pass's, because a backward pass has twice as
        many products."""
        communication_s = self.tensor_forward_s + self.expert_forward_s + self.context_forward_s + self.shard_s / 3
        return self.forward_s + communication_s + self.launch_s / 3

    @property
    def backward_pass_s(self) -> float:
        communication_s = self.tensor_backward_s + self.expert_backward_s + self.context_backward_s
        return self.backward_s + communication_s + (self.launch_s + self.shard_s) * 2 / 3


def stage_times(
    whole_stages: Sequence[StageProfile], rank_stages: Sequence[StageProfile], inputs: StepInputs
) -> list[StageTime]:
    """The time of each stage. `whole_stages` are the stages of the whole model, `rank_stages` the share of each stage
    that one rank of the tensor axis computes. The time of equal stages on equal devices is computed once."""
    priced: dict[object, StageTime] = {}
    times = []
    ranks = _ranks_of_stages(inputs) if inputs.stage_devices else [0] * len(rank_stages)
    for whole, local, rank in zip(whole_stages, rank_stages, ranks, strict=True):
        weights_bytes = sum(parameter.bytes for parameter in local.profile.parameters)
        on_rank = inputs.on_rank(rank)
        key = (
            id(on_rank.speeds),
            weights_bytes,
            _trained_bytes(local.profile),
            *((s.phase, s.block_count, id(s.operators)) for s in local.profile.segments),
        )
        if key not in priced:
            priced[key] = _stage_time(whole.profile, local.profile, on_rank)
        times.append(priced[key])
    return times


def _ranks_of_stages(inputs: StepInputs) -> list[int]:
    """The pipeline rank of each stage."""
    plan = inputs.plan
    ranks = {
        stage: rank
        for rank in range(plan.axes.pipeline)
        for stage in stages_of_rank(plan.pipeline.schedule, plan.axes.pipeline, plan.stages_per_rank, rank)
    }
    return [ranks[stage] for stage in sorted(ranks)]


def _stage_time(whole: ModelProfile, local: ModelProfile, inputs: StepInputs) -> StageTime:
    plan, cluster, runtime = inputs.plan, inputs.cluster, inputs.runtime
    tf32 = local.precision == "tf32"
    on_gpu = inputs.device.kind == "cuda"
    forward_s, forward_operators = pass_s(local, "forward", inputs.batch, inputs.speeds, tf32)
    backward_s, backward_operators = pass_s(local, "backward", inputs.batch, inputs.speeds, tf32)
    forward_s, backward_s = (
        max(0.0, busy_s - removed_gaps_s(local, phase, plan, on_gpu))
        for busy_s, phase in zip((forward_s, backward_s), _PHASES, strict=True)
    )
    backward_s += _accumulate_s(local, inputs)
    along_tensor, along_replicate = tensor_messages(whole, plan, inputs.batch, runtime)
    along_tensor += inputs.branch_messages
    groups = axis_groups(plan.axes, cluster)
    tensor_forward_s, tensor_backward_s = (
        (1 - runtime.tensor_overlap)
        * (
            messages_s(along_tensor, groups["tensor"], inputs.links or cluster, forward)
            + messages_s(along_replicate, groups["replicate"], cluster, forward)
        )
        for forward in (True, False)
    )
    to_experts = expert_messages(whole, plan, inputs.batch)
    context_ranks = inputs.context.ranks if inputs.context else 1
    among_experts = expert_group(plan.axes, cluster, context_ranks) if to_experts else groups["tensor"]
    expert_forward_s, expert_backward_s = (
        runtime.routed_share * messages_s(to_experts, among_experts, cluster, forward) for forward in (True, False)
    )
    messages = (*along_tensor, *along_replicate, *to_experts)
    launch_s = 0.0
    if changes_host_work(local, plan, on_gpu):
        forward_operators, backward_operators = (host_launches(local, phase, plan, on_gpu) for phase in _PHASES)
    if on_gpu:
        operators_s = (forward_operators + backward_operators) * operator_launch_s(inputs.device)
        launch_s = operators_s + sum(message.times for message in messages) * collective_launch_s(cluster)
    context_s = [
        attention_exchange_s(local, phase, inputs.batch, inputs.speeds, inputs.context, cluster)
        if inputs.context
        else 0.0
        for phase in _PHASES
    ]
    device_s = forward_s + backward_s + tensor_forward_s + tensor_backward_s + expert_forward_s + expert_backward_s
    shard_s = _shard_s(local, forward_s, backward_s, inputs)
    # While the device waits for an exchange, its host launches ahead.
    device_s += sum(context_s) + shard_s
    return StageTime(
        forward_s,
        backward_s,
        runtime.host_wait_s(launch_s, device_s) + _orchestration_s(local, messages, inputs),
        tensor_forward_s,
        tensor_backward_s,
        shard_s,
        expert_forward_s,
        expert_backward_s,
        *context_s,
    )


def _accumulate_s(local: ModelProfile, inputs: StepInputs) -> float:
    """Seconds of adding up gradients in one microbatch, averaged over all microbatches of a step, because the gradients
    of the first one are not added to anything. If gradients are scattered after each microbatch, a rank adds up only
    its shard of them."""
    plan = inputs.plan
    # A pipeline scatters gradients once, after the last microbatch.
    scatters_each = plan.memory.sharding != "optimizer" and plan.axes.pipeline == 1
    part = inputs.shard_part if scatters_each else 1.0
    weights = _trained_bytes(local) / _FP32_BYTES * part
    added_share = 1 - 1 / plan.microbatches
    bandwidth = inputs.speeds.bandwidth_bytes_per_s
    if offload_of(plan, inputs.device.kind) == "parameters":  # gradients are added up in CPU memory
        bandwidth = host_bandwidth(plan, inputs.cluster)
    return added_share * inputs.runtime.accumulate_bytes_per_weight * weights / bandwidth


def _orchestration_s(local: ModelProfile, messages: Sequence[TensorMessage], inputs: StepInputs) -> float:
    """Seconds that a CPU rank spends in a microbatch on managing sharded weights (one unit per block, and one for the
    rest), messages and the stage, see `Orchestration`; 0 on a GPU, whose host does this while the device computes."""
    if inputs.device.kind != "cpu":
        return 0.0
    plan, work = inputs.plan, inputs.runtime.orchestration
    units = (len(local.blocks) + 1) * (plan.axes.shard > 1)
    message_count, has_stages = sum(message.times for message in messages), plan.axes.pipeline > 1
    return inputs.device.launch_s * (work.unit * units + work.message * message_count + work.stage * has_stages)


def _trained_bytes(profile: ModelProfile) -> float:
    return sum(parameter.bytes for parameter in profile.parameters if parameter.trainable)


def _shard_s(local: ModelProfile, forward_s: float, backward_s: float, inputs: StepInputs) -> float:
    """Seconds that gathering weights and scattering gradients adds to both passes of a microbatch. A pass exchanges
    weights and gradients block by block: the first block is added in full, of the other blocks only what does not hide
    behind compute."""
    plan, runtime = inputs.plan, inputs.runtime
    if plan.axes.shard == 1 or plan.memory.sharding == "optimizer":
        return 0.0
    trained_bytes = gathered_bytes([p for p in local.parameters if p.trainable], local, plan)
    weights_bytes = gathered_bytes(local.parameters, local, plan)
    exchange = gradient_exchange(weights_bytes, len(local.blocks), plan, inputs.cluster, runtime, trained_bytes)
    gather_s = exchange.gather_s if plan.memory.sharding == "parameters" else 0.0
    scatter_s = exchange.scatter_s
    if offload_of(plan, inputs.device.kind) == "parameters":
        # A unit's shards are copied to the device before they are gathered, and its scattered gradients from it.
        gather_s += copy_s(weights_bytes / plan.axes.shard, inputs.device)
        scatter_s += copy_s(trained_bytes / plan.axes.shard, inputs.device)
    added_s = 0.0
    for compute_s, exchange_s in ((forward_s, gather_s), (backward_s, gather_s + scatter_s)):
        first_s = exchange_s / exchange.pieces
        hidden = overlap(compute_s * runtime.gather_overlap, exchange_s - first_s, inputs.device.kind)
        added_s += first_s + hidden.exposed_s
    return added_s
