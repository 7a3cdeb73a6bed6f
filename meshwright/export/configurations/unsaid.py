"""The list of what a configuration cannot say. A writer names the fields that it has said; every other field of the
plan that differs from its default is in the list, so that none is dropped without a word."""

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel

from meshwright.export.configurations.training import PlannedTraining, Unsaid

_WRAP = "let the script do it with torch's own functions, or train with meshwright"
_INSTEAD = {
    "axes.tensor": "split the layers in the script (torch's parallelize_module), or train with meshwright",
    "axes.pipeline": "cut the model in the script (torch.distributed.pipelining), or train with meshwright",
    "modules": _WRAP,
    "pipeline": "cut and schedule the model in the script (torch.distributed.pipelining)",
    "memory.recompute": "recompute the blocks in the script (torch.utils.checkpoint; of transformers,"
    " model.gradient_checkpointing_enable())",
    "memory.sharding": _WRAP,
    "memory.offload": "keep the optimizer on the GPU, or train with meshwright",
    "memory.accumulation": "accumulate gradients in the script",
    "numerics.precision": "choose the precision in the script",
    "numerics.cast": "choose what is cast in the script",
    "numerics.batch_norm": "convert the model with torch.nn.SyncBatchNorm.convert_sync_batchnorm, on GPUs",
    "gradients.algorithm": "the backend's own all-reduce is used",
    "gradients.bucket_bytes": "give DistributedDataParallel bucket_cap_mb in the script",
    "gradients.precision": "register torch's bf16_compress_hook or fp16_compress_hook with DistributedDataParallel",
    "gradients.powersgd_rank": "register torch's powerSGD_hook with DistributedDataParallel",
    "gradients": "train with meshwright",
    "compute.layout": "call model.to(memory_format=torch.channels_last) in the script, and move images likewise",
    "compute.compile": "call torch.compile in the script",
    "compute.compile_mode": "give torch.compile the mode in the script",
    "compute.cuda_graphs": "give torch.compile mode='reduce-overhead' in the script",
    "compute.fused_optimizer": "construct the optimizer with fused=True in the script",
    "compute.threads": "call torch.set_num_threads in the script",
    "compute": "train with meshwright",
    "shares": "these programs give every rank equally many samples: train with meshwright",
}


def unsaid_fields(
    training: PlannedTraining, said: Collection[str], instead: Mapping[str, str] | None = None
) -> list[Unsaid]:
    """The fields of the plan that differ from their defaults and are not among `said`. `instead` has other advice than
    the usual for some of them."""
    advice = {**_INSTEAD, **(instead or {})}
    entries = []
    for group_name, group in training.plan:
        for name, field in type(group).model_fields.items():
            key, value = f"{group_name}.{name}", getattr(group, name)
            if value != field.default and key not in said and _matters(key, training):
                entries.append(Unsaid(key, _plain(value), advice.get(key) or advice[group_name]))
    return entries


def _matters(key: str, training: PlannedTraining) -> bool:
    """Whether a field has an effect under this plan: not those of axes that have one rank."""
    axes = training.plan.axes
    if key.startswith("pipeline."):
        return axes.pipeline > 1
    if key == "memory.sharding":
        return axes.shard > 1
    return not (key == "memory.offload" and training.kind == "cpu")


def unsaid_job(training: PlannedTraining, said: Collection[str]) -> list[Unsaid]:
    """What the script has to take from the job itself: its optimizer, schedule, clipping and batch, as far as they are
    not among `said`. Without a job, that it has to know these."""
    job = training.job
    if job is None:
        missing = ("train.global_batch", "train.clip_norm", "optimizer", "schedule")
        return [
            Unsaid(field, None, "the plan does not have it: give --job JOB, or set it yourself") for field in missing
        ]
    values: dict[str, tuple[Any, str]] = {
        "train.global_batch": (
            job.train.global_batch,
            f"load {training.samples} samples in each batch of a rank",
        ),
        "optimizer": (_plain(job.optimizer), "construct it in the script"),
    }
    if job.train.clip_norm is not None:
        values["train.clip_norm"] = (job.train.clip_norm, "clip the norm of gradients in the script, before each step")
    if job.schedule is not None:
        values["schedule"] = (_plain(job.schedule), "construct and step it in the script")
    return [Unsaid(field, value, instead) for field, (value, instead) in values.items() if field not in said]


def _plain(value: Any) -> Any:
    """The value as it is written in JSON."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return list(value) if isinstance(value, tuple) else value
