"""`EngineSettings`: the functions by which scripts ask DeepSpeed's engine for its configuration."""

from typing import Any

import torch

from meshwright.compat.deepspeed_config.batch import CompleteSizes
from meshwright.compat.deepspeed_config.config import DeepSpeedConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class EngineSettings:
    """What a configuration says, in the form of DeepSpeed's methods. `sizes` are the batch sizes of this run."""

    configuration: DeepSpeedConfig
    sizes: CompleteSizes

    def train_batch_size(self) -> int:
        return self.sizes.train

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.sizes.micro

    def gradient_accumulation_steps(self) -> int:
        return self.sizes.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """Returns the batch size of a step, that of a forward pass on a rank, and the number of micro steps."""
        return self.sizes.train, self.sizes.micro, self.sizes.accumulation

    def gradient_clipping(self) -> float:
        return self.configuration.gradient_clipping

    def managed_gradient_accumulation(self) -> bool:
        return self.configuration.managed_accumulation

    def steps_per_print(self) -> int | None:
        return self.configuration.steps_per_print

    def dataloader_drop_last(self) -> bool:
        return self.configuration.drop_last

    def optimizer_name(self) -> str | None:
        section = self.configuration.optimizer
        if section is None:
            return None
        return section.name.lower() if section.name.lower() in ("adam", "adamw") else section.name

    def optimizer_params(self) -> dict[str, Any] | None:
        section = self.configuration.optimizer
        return None if section is None else dict(section.options)

    def scheduler_name(self) -> str | None:
        section = self.configuration.scheduler
        return None if section is None else section.name

    def scheduler_params(self) -> dict[str, Any] | None:
        section = self.configuration.scheduler
        return None if section is None else dict(section.options)

    # ---- ZeRO

    def zero_optimization(self) -> bool:
        return self.configuration.zero.stage > 0

    def zero_optimization_stage(self) -> int:
        return self.configuration.zero.stage

    def zero_optimization_partition_gradients(self) -> bool:
        return self.configuration.zero.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self.configuration.zero.stage == 3

    def zero_offload_optimizer(self) -> bool:
        return self.configuration.zero.offload != "none"

    def zero_offload_param(self) -> bool:
        return self.configuration.zero.offload == "parameters"

    zero_cpu_offload = zero_use_cpu_optimizer = zero_offload_optimizer

    # ---- precision

    def fp16_enabled(self) -> bool:
        return self.configuration.precision == "fp16" and not self.configuration.autocast

    def bfloat16_enabled(self) -> bool:
        return self.configuration.precision == "bf16" and not self.configuration.autocast

    def torch_autocast_enabled(self) -> bool:
        return self.configuration.autocast

    def torch_autocast_dtype(self) -> torch.dtype | None:
        return DTYPES[self.configuration.precision] if self.configuration.autocast else None

    def amp_enabled(self) -> bool:
        return False

    def communication_data_type(self) -> torch.dtype | None:
        precision = self.configuration.gradient_precision
        return None if precision is None else DTYPES[precision]

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtype of forward passes, and that in which gradients are accumulated."""
        return DTYPES[self.configuration.precision], torch.float32

    def dynamic_loss_scale(self) -> bool:
        return self.configuration.loss_scaling.fixed is None

    def initial_dynamic_scale(self) -> float:
        return self.configuration.loss_scaling.start

    def autotp_size(self) -> int:
        return self.configuration.tensor if self.configuration.tensor > 1 else 0
