"""`deepspeed.utils`, `deepspeed.runtime.utils` and `deepspeed.checkpointing`: small functions that scripts call."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from meshwright.compat.deepspeed.api.comm import get_rank
from meshwright.compat.deepspeed_config.config import load_file

logger = logging.getLogger("DeepSpeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs a message on these ranks; on all without `ranks`."""
    if not ranks or -1 in ranks or get_rank() in ranks:
        logger.log(level, "[Rank %s] %s", get_rank(), message)


def print_rank_0(message: str, debug: bool = False, force: bool = False) -> None:
    if get_rank() == 0:
        print(message, flush=True)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Logs how much GPU memory is in use, on rank 0."""
    if force and get_rank() == 0 and torch.cuda.is_available():
        logger.info("%s: %.2f GiB allocated", message, torch.cuda.memory_allocated() / 2**30)


def instrument_w_nvtx(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def OnDevice(dtype: Any = None, device: str = "meta", enabled: bool = True) -> AbstractContextManager[Any]:
    """The context in which modules are made on a device."""
    return torch.device(device) if enabled else nullcontext()


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    numbers = [int(part) for part in torch.__version__.split("+")[0].split(".")[:2]]

    def read(version: Any) -> list[int]:
        return [int(part) for part in str(version).split(".")[:2]]

    return (min_version is None or numbers >= read(min_version)) and (
        max_version is None or numbers <= read(max_version)
    )


def safe_get_full_fp32_param(param: Any) -> torch.Tensor | None:
    """The whole weight, in fp32. All ranks call this together."""
    return _whole(param).float()


def safe_get_full_grad(param: Any) -> torch.Tensor | None:
    """The whole gradient, in fp32; None without one. All ranks call this together."""
    return None if param.grad is None else _whole(param.grad).float()


def _whole(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.detach()
    return whole.full_tensor() if hasattr(whole, "full_tensor") else whole


# ---- deepspeed.checkpointing


def checkpoint(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the function, and computes its activations again in the backward pass."""
    return torch_checkpoint(function, *arguments, use_reentrant=False)


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Checks that the configuration can be read. `checkpoint` has no options."""
    if deepspeed_config is not None:
        load_file(deepspeed_config)


def is_configured() -> bool:
    return True


def reset() -> None:
    """Does nothing: `checkpoint` keeps nothing between calls."""


def model_parallel_cuda_manual_seed(seed: int) -> None:
    torch.manual_seed(seed)
