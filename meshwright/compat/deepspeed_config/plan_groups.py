"""The groups of the plan by which a DeepSpeed configuration trains, as plain data that `Plan` validates."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.compat.deepspeed_config.batch import CompleteSizes, complete
from meshwright.compat.deepspeed_config.config import DeepSpeedConfig, read_config, warn_about_keys
from meshwright.errors import InputError

_SHARDING = {1: "optimizer", 2: "gradients", 3: "parameters"}


def plan_of_config(config: str | Path | Mapping[str, Any], ranks: int | None) -> dict[str, Any]:
    """Reads a configuration, lists the keys that have no effect in a warning, and returns the groups of its plan for
    this number of ranks; None if its batch sizes determine it."""
    read = read_config(config)
    warn_about_keys(read, stacklevel=3)
    refuse_sum(read)
    data_ranks = data_ranks_of(read, ranks)
    accumulation = sizes_of(read, data_ranks).accumulation
    return plan_groups(read, data_ranks, accumulation=accumulation, recompute=read.recompute)


def data_ranks_of(config: DeepSpeedConfig, ranks: int | None, stages: int = 1) -> int:
    """The number of data-parallel ranks among `ranks`, of which `stages` hold a pipeline. Without `ranks`, it follows
    from the batch sizes, if the configuration has all three."""
    if ranks is None:
        if config.batch.data_ranks is None:
            raise InputError(
                f"{config.source} does not say for how many ranks it is: give from_deepspeed(…, ranks=N), or write all"
                " of train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps"
            )
        return config.batch.data_ranks
    group = config.tensor * stages
    if ranks < 1 or ranks % group:
        raise InputError(
            f"{config.source}: {ranks} ranks cannot be divided into groups of {config.tensor} tensor ranks × {stages}"
            " pipeline stages"
        )
    return ranks // group


def plan_groups(config: DeepSpeedConfig, data_ranks: int, *, accumulation: int, recompute: bool) -> dict[str, Any]:
    """Returns the groups. Where one rank holds the whole model, offloaded parameters stay on its device, and only the
    optimizer state is offloaded."""
    zero = config.zero
    shard = 1 if zero.stage == 0 else zero.shard_size or data_ranks
    if data_ranks % shard:
        raise InputError(
            f"{config.source}: zero_optimization.mics_shard_size is {shard}, which does not divide the {data_ranks}"
            " data-parallel ranks"
        )
    memory: dict[str, Any] = {"accumulation": accumulation, "recompute": "full" if recompute else "none"}
    if zero.stage:
        memory["sharding"] = _SHARDING[zero.stage]
        memory["offload"] = "optimizer" if zero.offload == "parameters" and shard == 1 else zero.offload
    # Under a shard axis FSDP2 rounds weights as DeepSpeed does; elsewhere operators round them.
    cast = "weights" if config.precision != "fp32" and not config.autocast and shard > 1 else "operators"
    gradients = {"precision": config.gradient_precision} if config.gradient_precision else {}
    return {
        "axes": {"replicate": data_ranks // shard, "shard": shard, "tensor": config.tensor},
        "memory": memory,
        "numerics": {"precision": config.precision, "cast": cast},
        "gradients": gradients,
    }


def sizes_of(config: DeepSpeedConfig, data_ranks: int) -> CompleteSizes:
    """The batch sizes for this number of data-parallel ranks. Without any, one sample per rank."""
    sizes = config.batch
    if sizes.train is None and sizes.micro is None:
        return CompleteSizes(data_ranks * (sizes.accumulation or 1), 1, sizes.accumulation or 1, data_ranks)
    return complete(sizes, data_ranks, config.source)


def refuse_sum(config: DeepSpeedConfig) -> None:
    """Raises an `InputError` if the configuration adds gradients up, which a plan does not."""
    if config.gradient_sum:
        raise InputError(
            f"{config.source}: gradient_allreduce_op is sum, but plans average gradients: leave it out, and multiply"
            " the learning rate by the number of data-parallel ranks where the optimizer depends on it"
        )
