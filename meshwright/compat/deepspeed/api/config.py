"""`deepspeed.runtime.config` and its neighbours: objects by which scripts read a configuration themselves."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from meshwright.compat.deepspeed.api.comm import get_world_size
from meshwright.compat.deepspeed.errors import CallError
from meshwright.compat.deepspeed_config.batch import BatchSizes, complete
from meshwright.compat.deepspeed_config.config import CLIPPING, load_file
from meshwright.errors import InputError

ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
ADAGRAD_OPTIMIZER = "adagrad"
LAMB_OPTIMIZER = "lamb"
LION_OPTIMIZER = "lion"
TORCH_ADAM_PARAM = "torch_adam"
ADAM_W_MODE = "adam_w_mode"
ADAM_W_MODE_DEFAULT = True


class DeepSpeedConfigError(Exception):
    """Scripts catch it; the drop-in raises `meshwright.errors.InputError`."""


class DeepSpeedConfig:
    """The values of a configuration that scripts look at. Reading one refuses less than `initialize` does."""

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        raw, self._source = load_file(config)
        self._param_dict = raw
        self.world_size = get_world_size() if mpu is None else mpu.get_data_parallel_world_size()
        self.train_batch_size = raw.get("train_batch_size")
        self.train_micro_batch_size_per_gpu = raw.get("train_micro_batch_size_per_gpu")
        self.gradient_accumulation_steps = raw.get("gradient_accumulation_steps")
        self.gradient_clipping = raw.get("gradient_clipping", CLIPPING)
        self.zero_config = DeepSpeedZeroConfig(**(raw.get("zero_optimization") or {}))
        self.zero_optimization_stage = self.zero_config.stage
        self.zero_enabled = self.zero_optimization_stage > 0
        self.bfloat16_config, self.float16_config = get_bfloat16_config(raw), get_float16_config(raw)
        optimizer, scheduler = raw.get("optimizer") or {}, raw.get("scheduler") or {}
        self.optimizer_name, self.optimizer_params = optimizer.get("type"), optimizer.get("params")
        self.scheduler_name, self.scheduler_params = scheduler.get("type"), scheduler.get("params")
        eigenvalue = raw.get("eigenvalue") or {}
        self.eigenvalue_enabled = eigenvalue.get("enabled", False)
        self.eigenvalue_verbose = eigenvalue.get("verbose", False)
        self.gradient_allreduce_op = self._gradient_operation()
        self._configure_train_batch_size()

    def _gradient_operation(self) -> str:
        raw = self._param_dict
        operation = str(raw.get("gradient_allreduce_op", "mean")).lower()
        if operation not in ("mean", "sum"):
            raise ValueError(f"Invalid gradient_allreduce_op {operation!r}: write 'mean' or 'sum'")
        if operation == "sum":
            for name, used in (
                ("ZeRO stage 3", self.zero_optimization_stage == 3),
                ("ZenFlow", (raw.get("zero_optimization") or {}).get("zenflow") is not None),
                ("DeepCompile", (raw.get("compile") or {}).get("deepcompile", False)),
            ):
                if used:
                    raise ValueError(f"gradient_allreduce_op 'sum' is not supported with {name}: write 'mean'")
        return operation

    def _configure_train_batch_size(self) -> None:
        """Computes the batch sizes that are None, and checks all of them."""
        given = BatchSizes(self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps)
        try:
            sizes = complete(given, self.world_size, self._source)
        except InputError as error:
            raise CallError(str(error)) from None
        self.train_batch_size = sizes.train
        self.train_micro_batch_size_per_gpu = sizes.micro
        self.gradient_accumulation_steps = sizes.accumulation


class DeepSpeedZeroConfig(SimpleNamespace):
    """The section `zero_optimization`. Names that begin with `stage3_` are also there without it."""

    def __init__(self, **values: Any) -> None:
        defaults = {"stage": 0, "gather_16bit_weights_on_model_save": False}
        short = {key.removeprefix("stage3_").replace("fp16", "16bit"): value for key, value in values.items()}
        super().__init__(**{**defaults, **values, **short})


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> SimpleNamespace:
    section = param_dict.get("bf16") or param_dict.get("bfloat16") or {}
    return SimpleNamespace(**{"enabled": False, "check_grad_overflow": True, **section})


def get_float16_config(param_dict: Mapping[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**{"enabled": False, "loss_scale": 0, **(param_dict.get("fp16") or {})})
