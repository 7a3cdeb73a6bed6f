"""The torchrun command of a plan, as a shell script. torchrun starts ranks and nothing else: comments of the script say
what the user's script has to do with torch."""

from meshwright.export.configurations.training import Configuration, PlannedTraining, Unsaid
from meshwright.export.configurations.unsaid import unsaid_fields, unsaid_job

_INSTEAD = {
    "axes.replicate": "wrap the model in torch.nn.parallel.DistributedDataParallel",
    "axes.shard": "call torch.distributed.fsdp.fully_shard for each block and for the model, on a mesh of this size",
    "memory.sharding": "give fully_shard reshard_after_forward=False, so that weights are gathered once a step",
    "memory.accumulation": "average gradients in the last of these microbatches only (DistributedDataParallel.no_sync,"
    " FSDPModule.set_requires_gradient_sync), and divide each loss by their number",
    "memory.offload": "parameters: give fully_shard offload_policy=CPUOffloadPolicy(); torch has nothing for optimizer",
    "numerics.precision": "run the forward pass under torch.autocast (bf16, fp16 with torch.amp.GradScaler), or set"
    " torch.backends.fp32_precision for tf32",
    "numerics.cast": "give fully_shard mp_policy=MixedPrecisionPolicy(param_dtype=…, reduce_dtype=torch.float32)",
}


def torchrun_configuration(training: PlannedTraining) -> Configuration:
    """Returns the command as a shell script, and what the user's script has to do itself."""
    unsaid = (*unsaid_fields(training, {"compute.threads"}, _INSTEAD), *unsaid_job(training, ()))
    command = _command(training)
    lines = ["#!/bin/sh", f"# {training.plan.summary()}", "# SCRIPT has to do this itself:", *map(_comment, unsaid)]
    return Configuration("\n".join([*lines, f'exec env {command} "$@"', ""]), "sh FILE SCRIPT", unsaid)


def _comment(entry: Unsaid) -> str:
    return f"#   {entry.field}: {entry.value}: {entry.instead}".replace("\n", " ")


def _command(training: PlannedTraining) -> str:
    if training.machines == 1:
        places = "--standalone"
    else:  # the same command on every machine
        places = f"--nnodes {training.machines} --rdzv-backend c10d --rdzv-id meshwright --rdzv-endpoint $HOST:29500"
    return f"{training.environment}torchrun {places} --nproc-per-node {training.ranks_per_machine}"
