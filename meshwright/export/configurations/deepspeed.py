"""DeepSpeed's configuration (`ds_config.json`) of a plan.

    replicate                    ZeRO stage 0
    shard, memory.sharding       stage 1 (optimizer), 2 (gradients), 3 (parameters)
    memory.offload               offload_optimizer, with parameters also offload_param
    precision, cast operators    torch_autocast, without modules whose gradients would be sent in 16 bits
    precision, cast weights      bf16 or fp16, with the loss scale that we begin with
    clip_norm                    gradient_clipping; 0 for none, because without the entry DeepSpeed clips to 1
    optimizer, schedule          those of torch that take no parameter groups; DeepSpeed steps a schedule every step

An optimizer is torch's own (`torch_adam`), not DeepSpeed's, whose arithmetic differs.
"""

import json
from typing import Any

from meshwright.export.configurations.training import (
    TORCH_OPTIMIZERS,
    TORCH_SCHEDULES,
    Configuration,
    PlannedTraining,
    Unsaid,
    torch_call,
)
from meshwright.export.configurations.unsaid import unsaid_fields, unsaid_job

_STAGES = {"optimizer": 1, "gradients": 2, "parameters": 3}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
_INSTEAD = {
    "axes.replicate": "DeepSpeed divides optimizer state over all data ranks: use one of the two axes, or deepspeed's"
    " MiCS in the script",
    "axes.tensor": "set tensor_parallel.autotp_size for a model of transformers, which chooses the splits itself",
    "axes.pipeline": "build the model as deepspeed.pipe.PipelineModule in the script",
    "memory.offload": "DeepSpeed keeps only state in CPU memory that ZeRO divides: use axes.shard, or one rank",
    "compute.compile": "call engine.compile() in the script",
    "compute.compile_mode": "give engine.compile the mode in the script",
    "numerics.precision": "set torch.backends.fp32_precision in the script for tf32; fp8 needs other layers",
}


def deepspeed_configuration(training: PlannedTraining) -> Configuration:
    """Returns DeepSpeed's configuration, and what it cannot say."""
    plan = training.plan
    said = {"axes.replicate", "axes.shard", "memory.sharding", "memory.accumulation", "compute.threads"}
    config: dict[str, Any] = {**_batch(training), "gradient_clipping": _clipping(training)}
    zero = _zero(training)
    if zero["stage"] or "offload_optimizer" not in zero:
        said.add("memory.offload")
    if plan.axes.replicate > 1 and plan.axes.shard > 1:
        said.discard("axes.replicate")
    if plan.gradients.bucket_bytes and zero["stage"]:
        zero["reduce_bucket_size"] = max(1, plan.gradients.bucket_bytes // 4)  # in numbers
        said.add("gradients.bucket_bytes")
    config["zero_optimization"] = zero
    if plan.numerics.precision in ("fp32", *_DTYPES):
        config |= _precision(training)
        said |= {"numerics.precision", "numerics.cast"}
    if plan.gradients.precision in _DTYPES:
        config["communication_data_type"] = plan.gradients.precision
        said.add("gradients.precision")
    said_of_job = {"train.global_batch", "train.clip_norm"} if training.job else set()
    optimizer = _optimizer(training)
    if optimizer is not None:
        config["optimizer"] = optimizer
        said_of_job.add("optimizer")
        said.add("compute.fused_optimizer")
    if zero["stage"]:
        config["zero_allow_untested_optimizer"] = True
        config["zero_force_ds_cpu_optimizer"] = False
    schedule = _schedule(training)
    if schedule is not None and optimizer is not None:
        config["scheduler"] = schedule
        said_of_job.add("schedule")
    cannot_say = [*unsaid_fields(training, said, _INSTEAD), *unsaid_job(training, said_of_job)]
    if zero["stage"] and plan.axes.shard == 1 and plan.axes.replicate > 1:
        cannot_say.append(
            Unsaid("axes.replicate", plan.axes.replicate, "optimizer state in CPU memory is divided among the ranks")
        )
    return Configuration(json.dumps(config, indent=2) + "\n", _command(training), tuple(cannot_say))


def _batch(training: PlannedTraining) -> dict[str, Any]:
    """The batch sizes; without a job `auto`, which transformers' Trainer fills in."""
    samples, job = training.samples, training.job
    return {
        "train_batch_size": job.train.global_batch if job else "auto",
        "train_micro_batch_size_per_gpu": samples if samples is not None else "auto",
        "gradient_accumulation_steps": training.plan.memory.accumulation,
    }


def _clipping(training: PlannedTraining) -> float | str:
    if training.job is None:
        return "auto"
    return training.job.train.clip_norm or 0.0


def _zero(training: PlannedTraining) -> dict[str, Any]:
    plan = training.plan
    zero: dict[str, Any] = {"stage": _STAGES[plan.memory.sharding] if plan.axes.shard > 1 else 0}
    offload = plan.memory.offload if training.kind == "cuda" else "none"
    if offload != "none":
        zero["stage"] = max(1, zero["stage"])  # only state that ZeRO manages can be offloaded
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if offload == "parameters":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if zero["stage"]:
        zero["overlap_comm"] = training.kind == "cuda"
    return zero


def _precision(training: PlannedTraining) -> dict[str, Any]:
    precision, cast = training.plan.numerics.precision, training.plan.numerics.cast
    if precision == "fp32":
        return {}
    if cast == "operators":
        entry: dict[str, Any] = {"enabled": True, "dtype": _DTYPES[precision]}
        if training.plan.gradients.precision == "fp32":
            entry["lower_precision_safe_modules"] = []
        return {"torch_autocast": entry}
    if precision == "bf16":
        return {"bf16": {"enabled": True}, "communication_data_type": training.plan.gradients.precision}
    scale = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1}
    return {"fp16": {"enabled": True, **scale}, "communication_data_type": training.plan.gradients.precision}


def _optimizer(training: PlannedTraining) -> dict[str, Any] | None:
    """The section of an optimizer of torch without parameter groups; None for others."""
    call = torch_call(training, "optimizer", TORCH_OPTIMIZERS)
    if call is None or training.job is None or training.job.optimizer.groups:
        return None
    name, options = call
    if training.plan.compute.fused_optimizer:
        options["fused"] = True
    if name in ("Adam", "AdamW"):
        # DeepSpeed makes AdamW of both unless it is told otherwise.
        options |= {"torch_adam": True, **({"adam_w_mode": False} if name == "Adam" else {})}
    return {"type": name, "params": options}


def _schedule(training: PlannedTraining) -> dict[str, Any] | None:
    """The section of a schedule of torch that is stepped in every step; None for others."""
    call = torch_call(training, "schedule", TORCH_SCHEDULES)
    if call is None or training.job is None or training.job.schedule is None:
        return None
    per = training.job.schedule.per or ("step" if training.job.train.epochs is None else "epoch")
    return {"type": call[0], "params": call[1]} if per == "step" and call[0] != "ReduceLROnPlateau" else None


def _command(training: PlannedTraining) -> str:
    accelerator = "DS_ACCELERATOR=cpu " if training.kind == "cpu" else ""
    nodes = f"--num_nodes {training.machines} --hostfile HOSTS " if training.machines > 1 else ""
    number = f"--num_gpus {training.ranks_per_machine}"
    launcher = f"deepspeed {nodes}{number}"
    if training.kind == "cpu":
        launcher = f"torchrun --standalone --nproc-per-node {training.plan.world_size}"
    return f"{accelerator}{training.environment}{launcher} SCRIPT --deepspeed_config FILE"
