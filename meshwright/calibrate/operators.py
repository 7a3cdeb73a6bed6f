"""How long each class of operators takes on a device, over shapes and dtypes: what `doctor --calibrate` writes down.

The shapes (products.py, movers.py) are a grid of their own, not those of any model: small to large, square and thin,
so that what lies between can be interpolated. Shapes that would take this device too long, or more memory than it has,
are left out. In a model most of what an operator reads has left the cache since it was written, so each is run on
several sets of inputs in turn.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.calibrate.case import Case, Run
from meshwright.calibrate.compute_bound_cases import product_cases
from meshwright.calibrate.memory_bound_cases import mover_cases
from meshwright.calibrate.timing import device_seconds
from meshwright.dtypes import TORCH_DTYPES, Dtype, float32_products

LONGEST_S = {"cpu": 0.04, "cuda": 0.03}  # of one run, as its rate foretells
BUDGET_S = {"cpu": 0.01, "cuda": 0.01}
CACHE_BYTES = {"cpu": 2**23, "cuda": 2**27}  # more than stays in a cache
MOST_SETS = 8
AT_ONCE = 16
SMALL = {"cpu": 2**13, "cuda": 2**20}  # elements, below which as many are taken back at once


def measure_operators(device: torch.device, rates: dict[Dtype, float]) -> list[dict[str, Any]]:
    """Rows of `OperatorTime`."""
    rows: list[dict[str, Any]] = []
    # A type that a core only emulates is worth no plan, and takes longer to measure than all others.
    slow = {dtype for dtype, rate in rates.items() if device.type == "cpu" and rate < rates["fp32"] / 4}
    for case in cases(device.type):
        for dtype in case.dtypes:
            if dtype in rates and dtype not in slow and not _too_much(case, rates[dtype], device):
                with float32_products(dtype):
                    rows += _measure(case, dtype, device)
    return rows


def cases(kind: str) -> Iterator[Case]:
    """Every operator and shape, for a CPU core or a GPU."""
    yield from product_cases(kind == "cuda")
    yield from mover_cases(kind == "cuda")


def _too_much(case: Case, rate: float, device: torch.device) -> bool:
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 2**30
    return case.flops / rate > LONGEST_S[device.type] or 4 * case.largest_bytes > free / 2


def _measure(case: Case, dtype: Dtype, device: torch.device) -> Iterator[dict[str, Any]]:
    kind, budget_s = TORCH_DTYPES[dtype], BUDGET_S[device.type]
    size = case.elements * kind.itemsize + case.integer_bytes
    sets = min(MOST_SETS, 1 + int(CACHE_BYTES[device.type] / size))
    try:
        runs = [case.build(kind, device) for _ in range(sets)]
        yield _row(case, dtype, "forward", device_seconds(runs, device, budget_s))
        if case.back_elements:
            back, together = _backward(case, runs, kind, device)
            yield _row(case, dtype, "backward", device_seconds(back, device, budget_s) / together)
    except (RuntimeError, NotImplementedError):  # no such kernel on this device, or too little memory
        return


def _backward(case: Case, runs: list[Run], kind: torch.dtype, device: torch.device) -> tuple[list[Run], int]:
    """Backward passes that can be run again and again, and how many results each of them starts from. Starting autograd
    costs more than a small operator: several are taken back at once, as in a model."""
    if case.elements < SMALL[device.type]:
        more = [case.build(kind, device) for _ in range(AT_ONCE - len(runs))]
        return [_gradients([run() for run in (*runs, *more)])], max(AT_ONCE, len(runs))
    return [_gradients([run()]) for run in runs], 1


def _gradients(results: list[Tensor]) -> Run:
    inputs = [tensor for result in results for tensor in _leaves(result)]
    ones = [torch.ones_like(result) for result in results]
    return partial(torch.autograd.grad, results, inputs, ones, retain_graph=True)  # type: ignore[return-value]


def _row(case: Case, dtype: Dtype, direction: str, taken: float) -> dict[str, Any]:
    back = direction == "backward"
    elements = case.back_elements if back else case.elements
    return {
        "operator": case.operator,
        "direction": direction,
        "dtype": dtype,
        "shape": case.shape,
        "layout": case.layout,
        "flops": float(case.back_flops if back else case.flops),
        "bytes": float(elements * TORCH_DTYPES[dtype].itemsize + case.integer_bytes),
        "seconds": taken,
    }


def _leaves(result: Tensor) -> list[Tensor]:
    """The inputs that a result was computed from and that want gradients."""
    found: list[Tensor] = []
    seen, waiting = set(), [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.append(variable)
        waiting += [following for following, _ in node.next_functions]
    return found
