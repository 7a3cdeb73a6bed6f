"""What a device reaches when nothing else asks for it: matrix rates by dtype, memory bandwidth, launch latency.

A CPU device is one core, so its rates are measured on one thread; its bandwidth is its share of what all cores get.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from meshwright.calibrate.timing import seconds
from meshwright.dtypes import DTYPES, TORCH_DTYPES, Dtype, float32_products

_LAYERS = 32

LARGEST = {"cpu": 1024, "cuda": 8192}
ENOUGH_S = {"cpu": 0.02, "cuda": 0.002}


def matrix_rates(device: torch.device) -> dict[Dtype, float]:
    """Operations a second of a large square product, for every dtype that has one here."""
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
    """The best of growing sizes, up to one that takes long enough for its start not to count."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    least: dict[Dtype, tuple[int, int]] = {"tf32": (8, 0), "fp8": (8, 9), "int8": (7, 5), "bf16": (8, 0)}
    if dtype in least and capability < least[dtype] and not (device.type == "cpu" and dtype == "bf16"):
        return None
    best, size = 0.0, LARGEST[device.type] // 8
    while size <= LARGEST[device.type]:
        with float32_products(dtype):
            taken = seconds(product(dtype, size, size, size, device), device, budget_s=0.05)
        best = max(best, 2 * size**3 / taken)
        if taken > ENOUGH_S[device.type]:
            break
        size *= 2
    return best


def product(dtype: Dtype, m: int, n: int, k: int, device: torch.device) -> Callable[[], object]:
    """A matrix product of random numbers: zeros would draw less power, and a GPU would run faster than it can."""
    kind = TORCH_DTYPES[dtype]
    if dtype == "int8":
        a = torch.randint(-128, 127, (m, k), dtype=kind, device=device)
        b = torch.randint(-128, 127, (n, k), dtype=kind, device=device).t()
        return lambda: torch._int_mm(a, b)
    left, right = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    if dtype == "fp8":
        one = torch.ones((), device=device)
        a, b = left.to(kind), right.to(kind).t()
        return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    a, b = left.to(kind), right.to(kind).t()
    return lambda: torch.mm(a, b)


def copy_bandwidth(device: torch.device, largest_bytes: int = 2**27) -> float:
    """Bytes read and written a second by a copy far larger than any cache."""
    size = largest_bytes if device.type == "cpu" else 8 * largest_bytes
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device, budget_s=0.3)


def launch_latency(device: torch.device) -> float:
    """Seconds that the host takes for one operator of a training step: both passes of a row of layers that are too
    small to matter. A layer starts a product and an activation, and in backward the gradients of its activation,
    input, weight and bias."""
    layers = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(_LAYERS)]
    model = nn.Sequential(*layers).to(device)
    sample = torch.zeros(4, 16, device=device)

    def step() -> None:
        model(sample).sum().backward()

    for _ in range(10):  # kernels are loaded when they are first asked for
        step()
    return seconds(step, device, budget_s=0.1) / (6 * _LAYERS)


def context_bytes(device: torch.device, used_before: int) -> int:
    """What this process takes before any tensor: on the GPU, or of the machine's memory."""
    if device.type == "cuda":
        torch.zeros(1, device=device)
        free, total = torch.cuda.mem_get_info(device)
        return max(0, total - free - torch.cuda.memory_reserved(device) - used_before)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
