"""Seconds of what follows the passes of a pipeline rank: combining the remaining gradients, gathering weights if they
are gathered once a step, summing the gradients of tied weights, and the optimizer step."""

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.simulator.communication.collectives import overlap
from meshwright.simulator.communication.exchange import gradient_exchange
from meshwright.simulator.compute.passes import optimizer_s
from meshwright.simulator.experts import gathered_bytes, gathered_share
from meshwright.simulator.offload import host_step_s, offload_of, optimizer_copies_s
from meshwright.simulator.pipeline.order import stages_of_rank
from meshwright.simulator.pipeline.stages import StageProfile
from meshwright.simulator.stage_time import StageTime
from meshwright.simulator.step_inputs import StepInputs
from meshwright.simulator.tensor.split_profile import replicate_split_parameters


@dataclass(frozen=True)
class StepEnd:
    """Seconds after the passes of one pipeline rank: summing the gradients of tied weights, combining gradients over
    the replicate axis, scattering gradients and gathering weights over the shard axis, copies between the device
    and CPU memory, and the optimizer step."""

    tied_s: float
    replicate_s: float
    shard_s: float
    offload_s: float
    optimizer_s: float

    @property
    def total_s(self) -> float:
        return self.tied_s + self.replicate_s + self.shard_s + self.offload_s + self.optimizer_s


def step_end(
    rank: int,
    times: Sequence[StageTime],
    stages: Sequence[StageProfile],
    inputs: StepInputs,
    slack_s: float,
    tied_s: float,
) -> StepEnd:
    """The seconds after the passes of a pipeline rank, without communication that hides behind compute. Combining
    gradients hides behind the last backward pass, except for the last bucket, which is ready only when the pass ends.
    It also hides behind `slack_s`, in which other pipeline ranks still compute. Gathering weights once a step hides
    behind the next forward pass. While a GPU waits for these exchanges, its host launches ahead, so that the GPU waits
    for the host less by as much: a step takes as long as the launches, or as the work of the device with all that does
    not hide, whichever is longer."""
    plan, runtime, kind = inputs.plan, inputs.runtime, inputs.device.kind
    numbers: tuple[int, ...] = (0,)
    if plan.axes.pipeline > 1:
        numbers = stages_of_rank(plan.pipeline.schedule, plan.axes.pipeline, plan.stages_per_rank, rank)
    profiles = [stages[number].profile for number in numbers]
    parameters = [parameter for profile in profiles for parameter in profile.parameters]
    trained = [parameter for parameter in parameters if parameter.trainable]
    not_combined = {name for profile in profiles for name in replicate_split_parameters(profile, plan)}
    weights_bytes, combined_bytes = (
        sum(parameter.bytes for parameter in group if parameter.names[0] not in not_combined)
        for group in (parameters, trained)
    )
    blocks = sum(len(profile.blocks) for profile in profiles)
    gathered, scattered = float(weights_bytes), float(combined_bytes)
    if gathered_share(plan.axes) < 1:  # experts are sharded over fewer ranks than other weights
        gathered = sum((gathered_bytes(profile.parameters, profile, plan) for profile in profiles), 0.0)
        trained_of = [[p for p in profile.parameters if p.trainable] for profile in profiles]
        scattered = sum(
            (gathered_bytes(group, profile, plan) for group, profile in zip(trained_of, profiles, strict=True)), 0.0
        )
    exchange = gradient_exchange(gathered, blocks, plan, inputs.cluster, runtime, scattered, combined_bytes)
    scatter_s = exchange.scatter_s if plan.memory.sharding == "optimizer" else 0.0
    # A rank with several stages combines the gradients of a finished stage while a round of microbatches (one per rank)
    # passes its other stages.
    passes = plan.axes.pipeline if len(numbers) > 1 else 1
    backward_s = passes * sum(times[number].backward_s for number in numbers)
    forward_s = passes * sum(times[number].forward_s for number in numbers)
    combine_s = exchange.replicate_s + scatter_s
    hiding_s = backward_s * (1 - 1 / exchange.pieces) * runtime.gradient_overlap
    exposed_s = max(0.0, overlap(hiding_s, combine_s, kind).exposed_s - slack_s) if combine_s else 0.0
    gather_s = 0.0
    if plan.memory.sharding != "parameters" and exchange.gather_s:
        gather_s = overlap(forward_s * runtime.gather_overlap, exchange.gather_s, kind).exposed_s
    if kind == "cuda" and exposed_s + gather_s:
        host_waits_s = plan.microbatches * sum(times[number].launch_s for number in numbers)
        left = max(0.0, 1 - host_waits_s / (exposed_s + gather_s))
        exposed_s, gather_s = left * exposed_s, left * gather_s
    replicate_share = exchange.replicate_s / combine_s if combine_s else 0.0
    shard_bytes = sum(parameter.bytes for parameter in trained) * inputs.shard_part
    offload_s, update_s = _update_s(shard_bytes, len(trained), inputs)
    return StepEnd(
        tied_s, exposed_s * replicate_share, exposed_s * (1 - replicate_share) + gather_s, offload_s, update_s
    )


def _update_s(shard_bytes: float, tensors: int, inputs: StepInputs) -> tuple[float, float]:
    """Seconds of copies between the device and CPU memory for the optimizer step, and of the step, of a rank that
    updates `shard_bytes` of parameters in `tensors` tensors."""
    plan, optimizer, device = inputs.plan, inputs.optimizer, inputs.device
    offload = offload_of(plan, device.kind)
    if offload == "none":
        return 0.0, optimizer_s(shard_bytes, tensors, optimizer, device, inputs.speeds, inputs.runtime)
    copies_s = optimizer_copies_s(shard_bytes, device) if offload == "optimizer" else 0.0
    return copies_s, host_step_s(shard_bytes, optimizer, plan, inputs.cluster)
