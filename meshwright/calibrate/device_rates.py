"""Measures an idle device: matrix rates by dtype, memory bandwidth, launch latency, and the memory of an empty process.

A CPU device is one core, so its rates are measured on one thread. Its bandwidth is its share of what all cores reach.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from meshwright.calibrate.timing import seconds
from meshwright.calibrate.torch_private import fp8_product, int8_product
from meshwright.dtypes import DTYPES, TORCH_DTYPES, Dtype, float32_matmul_precision

_LAYERS = 32

# How large and how long the measured products are. These and the other limits of this package bound the time of a
# measurement; no prediction contains them.
LARGEST_SIDE = {"cpu": 1024, "cuda": 8192}
LONG_ENOUGH_S = {"cpu": 0.02, "cuda": 0.002}  # compared with this, the time of launching a product does not matter


def matrix_rates(device: torch.device) -> dict[Dtype, float]:
    """Returns the operations per second of a large square matrix product, by dtype. Dtypes in which the device cannot
    multiply matrices are left out."""
    rates: dict[Dtype, float] = {}
    for dtype in DTYPES:
        try:
            rate = _matrix_rate(dtype, device)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):  # no such product on this device
            continue
        if rate:
            rates[dtype] = rate
    return rates


def _matrix_rate(dtype: Dtype, device: torch.device) -> float | None:
    """Returns the best rate over growing sizes, up to the first size that takes `LONG_ENOUGH_S`; None if the device has
    no instructions for this dtype."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    # The compute capabilities whose tensor cores have the dtype: PTX ISA, `mma` instructions.
    required: dict[Dtype, tuple[int, int]] = {"tf32": (8, 0), "fp8": (8, 9), "int8": (7, 5), "bf16": (8, 0)}
    if dtype in required and capability < required[dtype] and not (device.type == "cpu" and dtype == "bf16"):
        return None
    best, size = 0.0, LARGEST_SIDE[device.type] // 8
    while size <= LARGEST_SIDE[device.type]:
        with float32_matmul_precision(dtype):
            product_s = seconds(matrix_product(dtype, size, size, size, device), device, budget_s=0.05)
        best = max(best, 2 * size**3 / product_s)
        if product_s > LONG_ENOUGH_S[device.type]:
            break
        size *= 2
    return best


def matrix_product(dtype: Dtype, m: int, n: int, k: int, device: torch.device) -> Callable[[], object]:
    """Returns a function that multiplies two matrices of random numbers. With zeros a GPU would draw less power and run
    at a higher clock than with real data."""
    torch_dtype = TORCH_DTYPES[dtype]
    if dtype == "int8":
        a = torch.randint(-128, 127, (m, k), dtype=torch_dtype, device=device)
        b = torch.randint(-128, 127, (n, k), dtype=torch_dtype, device=device).t()
        return lambda: int8_product(a, b)
    left, right = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    if dtype == "fp8":
        scale = torch.ones((), device=device)
        a, b = left.to(torch_dtype), right.to(torch_dtype).t()
        return lambda: fp8_product(a, b, scale)
    a, b = left.to(torch_dtype), right.to(torch_dtype).t()
    return lambda: torch.mm(a, b)


def copy_bandwidth(device: torch.device, largest_bytes: int = 2**27) -> float:
    """Returns the bytes read and written per second by a copy that is far larger than any cache."""
    size = largest_bytes if device.type == "cpu" else 8 * largest_bytes
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device, budget_s=0.3)


def launch_latency(device: torch.device) -> float:
    """Returns the seconds that the host takes to launch one operator of a training step. It is measured over the
    forward and backward pass of layers whose computation takes no time worth counting. Each layer launches six
    operators: a product and an activation, then the gradients of its activation, input, weight and bias."""
    layers = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(_LAYERS)]
    model = nn.Sequential(*layers).to(device)
    sample = torch.zeros(4, 16, device=device)

    def step() -> None:
        model(sample).sum().backward()

    for _ in range(10):  # kernels are loaded on first use
        step()
    return seconds(step, device, budget_s=0.1) / (6 * _LAYERS)


def context_bytes(device: torch.device, used_before: int) -> int:
    """Returns the bytes that this process takes before it creates any tensor: of the GPU's memory if the device is a
    GPU, else of the machine's memory. `used_before` are the bytes of the GPU's memory that were in use before this
    process started."""
    if device.type == "cuda":
        torch.zeros(1, device=device)
        free, total = torch.cuda.mem_get_info(device)
        return max(0, total - free - torch.cuda.memory_reserved(device) - used_before)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
