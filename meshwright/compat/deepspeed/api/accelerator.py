"""`deepspeed.accelerator`: the functions of the device that scripts call."""

import os
from functools import cache
from typing import Any

import torch


class Accelerator:
    """The GPU if there is one, otherwise the CPU. Functions that it does not have are those of `torch.cuda` or
    `torch.cpu`."""

    def __init__(self) -> None:
        self._name = "cuda" if torch.cuda.is_available() else "cpu"
        self._communication_backend_name = self.communication_backend_name()

    def is_available(self) -> bool:
        return True

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return torch.device(self.device_name(device_index))

    def current_device_name(self) -> str:
        return self.device_name(torch.cuda.current_device() if self._name == "cuda" else None)

    def current_device(self) -> Any:
        return torch.cuda.current_device() if self._name == "cuda" else "cpu"

    def set_device(self, device_index: int) -> None:
        if self._name == "cuda":
            torch.cuda.set_device(device_index)

    def device_count(self) -> int:
        """The number of GPUs; without one that of the cores, as each may run a rank."""
        return torch.cuda.device_count() if self._name == "cuda" else os.cpu_count() or 1

    def communication_backend_name(self) -> str:
        return "nccl" if self._name == "cuda" else "gloo"

    def is_bf16_supported(self) -> bool:
        return self._name == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return self._name == "cuda"

    def is_triton_supported(self) -> bool:
        return self._name == "cuda"

    def is_synchronized_device(self) -> bool:
        return self._name == "cpu"

    def use_host_timers(self) -> bool:
        return self._name == "cpu"

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, *([torch.float16] if self._name == "cuda" else [])]

    def random(self) -> Any:
        return torch.random

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.cuda.get_rng_state(device_index or 0) if self._name == "cuda" else torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        if self._name == "cuda":
            torch.cuda.set_rng_state(new_state, device_index or 0)
        else:
            torch.set_rng_state(new_state)

    def empty_cache(self) -> None:
        if self._name == "cuda":
            torch.cuda.empty_cache()

    def synchronize(self, device_index: int | None = None) -> None:
        if self._name == "cuda":
            torch.cuda.synchronize(device_index)

    def memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_allocated(device_index) if self._name == "cuda" else 0

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_allocated(device_index) if self._name == "cuda" else 0

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        if self._name == "cuda":
            torch.cuda.reset_peak_memory_stats(device_index)

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"] if self._name == "cuda" else []

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda if self._name == "cuda" else torch.cpu, name)


@cache
def get_accelerator() -> Accelerator:
    return Accelerator()


def is_current_accelerator_supported() -> bool:
    return True
