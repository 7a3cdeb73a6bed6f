"""Accelerate's configuration (the YAML file of `accelerate launch --config_file`) of a plan.

replicate                 MULTI_GPU or MULTI_CPU (DDP); NO for one rank
shard                     FSDP, version 2, on GPUs: with memory.sharding parameters, weights are freed between passes
shard × replicate         the same with parallelism_config
memory.offload            parameters: fsdp_offload_params
precision                 mixed_precision bf16 or fp16, which are autocast; with FSDP the weights are cast
compile                   dynamo_backend INDUCTOR, blocks as regional compilation
accumulation              the environment variable that Accelerator reads
"""

from typing import Any

import yaml

from meshwright.export.configurations.training import Configuration, PlannedTraining, Unsaid
from meshwright.export.configurations.unsaid import unsaid_fields, unsaid_job

_INSTEAD = {
    "axes.tensor": "give Accelerator a ParallelismConfig with tp_size for a model of transformers",
    "axes.shard": "Accelerate's FSDP runs on GPUs only: on CPU ranks the model is replicated",
    "memory.offload": "Accelerate's FSDP offloads parameters, gradients and optimizer state together: use parameters",
    "memory.sharding": "Accelerate's FSDP always divides gradients; weights stay gathered until the backward pass",
    "gradients.bucket_bytes": "give Accelerator a DistributedDataParallelKwargs with bucket_cap_mb",
    "gradients.precision": "give Accelerator a DistributedDataParallelKwargs with comm_hook",
    "gradients.powersgd_rank": "give Accelerator a DistributedDataParallelKwargs with comm_hook POWER_SGD",
    "numerics.cast": "with DDP, Accelerate casts the inputs of operators",
}


def accelerate_configuration(training: PlannedTraining) -> Configuration:
    """Returns Accelerate's configuration, and what it cannot say."""
    plan = training.plan
    said = {"axes.replicate", "memory.accumulation", "compute.threads"}
    said |= {"axes.shard"} if training.kind == "cuda" else set()
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _distributed_type(training),
        "num_processes": plan.world_size,
        "num_machines": training.machines,
        "machine_rank": 0,
        "rdzv_backend": "static",
        "same_network": True,
        "main_training_function": "main",
        "use_cpu": training.kind == "cpu",
        "mixed_precision": "no",
        "debug": False,
    }
    extra: list[Unsaid] = []
    if plan.numerics.precision in ("bf16", "fp16", "fp32"):
        config["mixed_precision"] = {"fp32": "no"}.get(plan.numerics.precision, plan.numerics.precision)
        said.add("numerics.precision")
    if config["distributed_type"] == "FSDP":
        said |= _add_shard_axis(training, config)
        if plan.numerics.cast == "operators" and plan.numerics.precision != "fp32":
            extra.append(
                Unsaid("numerics.cast", "operators", "with FSDP, Accelerate casts weights: set cast to weights")
            )
        said.add("numerics.cast")
    if plan.compute.compile != "none":
        config["dynamo_config"] = {
            "dynamo_backend": "INDUCTOR",
            "dynamo_mode": plan.compute.compile_mode,
            "dynamo_use_fullgraph": False,
            "dynamo_use_dynamic": False,
            "dynamo_use_regional_compilation": plan.compute.compile == "blocks",
        }
        said |= {"compute.compile", "compute.compile_mode"}
    cannot_say = (*unsaid_fields(training, said, _INSTEAD), *extra, *unsaid_job(training, ()))
    return Configuration(yaml.safe_dump(config, sort_keys=False), _command(training), cannot_say)


def _distributed_type(training: PlannedTraining) -> str:
    if training.plan.axes.shard > 1 and training.kind == "cuda":
        return "FSDP"
    if training.plan.world_size == 1:
        return "NO"
    return "MULTI_CPU" if training.kind == "cpu" else "MULTI_GPU"


def _add_shard_axis(training: PlannedTraining, config: dict[str, Any]) -> set[str]:
    """Adds the entries of FSDP; returns the fields of the plan that they say."""
    plan = training.plan
    config["fsdp_config"] = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": plan.memory.sharding == "parameters",
        "fsdp_offload_params": plan.memory.offload == "parameters",
        "fsdp_activation_checkpointing": plan.memory.recompute == "full",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": False,
    }
    if plan.axes.replicate > 1:
        config["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": plan.axes.replicate,
            "parallelism_config_dp_shard_size": plan.axes.shard,
        }
    said = {"memory.offload"} if plan.memory.offload == "parameters" else set()
    said |= {"memory.recompute"} if plan.memory.recompute == "full" else set()
    return said | ({"memory.sharding"} if plan.memory.sharding == "parameters" else set())


def _command(training: PlannedTraining) -> str:
    accumulation = training.plan.memory.accumulation
    steps = f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={accumulation} " if accumulation > 1 else ""
    return f"{training.environment}{steps}accelerate launch --config_file FILE SCRIPT"
