"""Times each class of operators on a device, over shapes and dtypes; `doctor --calibrate` writes the result to a file.

The shapes (compute_bound_cases.py, memory_bound_cases.py) are a grid that belongs to no model: small to large, square
and thin, so that shapes between them can be interpolated. Shapes that would take this device too long, or more memory
than it has, are left out. In a model most inputs of an operator have left the cache since they were written, so each
case runs on several sets of inputs in turn.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.calibrate.case import OperatorCase, TimedCall
from meshwright.calibrate.compute_bound_cases import compute_bound_cases
from meshwright.calibrate.memory_bound_cases import memory_bound_cases
from meshwright.calibrate.timing import device_seconds
from meshwright.dtypes import TORCH_DTYPES, Dtype, float32_matmul_precision

LONGEST_S = {"cpu": 0.04, "cuda": 0.03}  # of one run, as predicted from the device's rate
BUDGET_S = {"cpu": 0.01, "cuda": 0.01}
# More than stays in a cache: a few MiB for a CPU core; the L2 of an H100 has 50 MB (NVIDIA H100 whitepaper v1.04).
CACHE_BYTES = {"cpu": 2**23, "cuda": 2**27}
MOST_INPUT_SETS = 8
JOINT_BACKWARDS = 16  # results that share one backward pass, in cases with fewer than SMALL_ELEMENTS elements
SMALL_ELEMENTS = {"cpu": 2**13, "cuda": 2**20}


def measure_operators(
    device: torch.device, rates: dict[Dtype, float], cases: Iterable[OperatorCase] | None = None
) -> list[dict[str, Any]]:
    """Returns the fields of one `OperatorTime` for each case, direction and dtype that was timed. `cases` are all of a
    calibration if None."""
    rows: list[dict[str, Any]] = []
    # A dtype that a core only emulates is useless for training, and takes longer to measure than all other dtypes. A
    # core with instructions for a 16-bit dtype is not slower in it than in fp32, so a dtype with less than a quarter of
    # the fp32 rate is emulated.
    emulated = {dtype for dtype, rate in rates.items() if device.type == "cpu" and rate < rates["fp32"] / 4}
    for case in operator_cases(device.type) if cases is None else cases:
        for dtype in case.dtypes:
            if dtype in rates and dtype not in emulated and not _exceeds_limits(case, rates[dtype], device):
                with float32_matmul_precision(dtype):
                    rows += _measure(case, dtype, device)
    return rows


def operator_cases(kind: str) -> Iterator[OperatorCase]:
    """Yields every operator and shape to time on a device of this `kind` (`cpu` or `cuda`)."""
    yield from compute_bound_cases(kind == "cuda")
    yield from memory_bound_cases(kind == "cuda")


def _exceeds_limits(case: OperatorCase, rate: float, device: torch.device) -> bool:
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 2**30
    return case.flops / rate > LONGEST_S[device.type] or 4 * case.largest_bytes > free / 2


def _measure(case: OperatorCase, dtype: Dtype, device: torch.device) -> Iterator[dict[str, Any]]:
    torch_dtype, budget_s = TORCH_DTYPES[dtype], BUDGET_S[device.type]
    size_bytes = case.elements * torch_dtype.itemsize + case.integer_bytes
    input_sets = min(MOST_INPUT_SETS, 1 + int(CACHE_BYTES[device.type] / size_bytes))
    try:
        forwards = [case.build(torch_dtype, device) for _ in range(input_sets)]
        yield _row(case, dtype, "forward", device_seconds(forwards, device, budget_s))
        if case.backward_elements:
            backwards, results = _backward_calls(case, forwards, torch_dtype, device)
            yield _row(case, dtype, "backward", device_seconds(backwards, device, budget_s) / results)
    except (RuntimeError, NotImplementedError):  # no such kernel on this device, or too little memory
        return


def _backward_calls(
    case: OperatorCase, forwards: list[TimedCall], torch_dtype: torch.dtype, device: torch.device
) -> tuple[list[TimedCall], int]:
    """Returns functions that run a backward pass and can be called repeatedly, and the number of forward results that
    each of them starts from. Starting autograd takes longer than a small operator, so several runs of a small case
    share one backward pass, as the operators of a model do."""
    if case.elements < SMALL_ELEMENTS[device.type]:
        more = [case.build(torch_dtype, device) for _ in range(JOINT_BACKWARDS - len(forwards))]
        return [_gradients([run() for run in (*forwards, *more)])], max(JOINT_BACKWARDS, len(forwards))
    return [_gradients([run()]) for run in forwards], 1


def _gradients(results: list[Tensor]) -> TimedCall:
    """Returns a function that computes the gradients of the results with respect to all their leaves."""
    inputs = [tensor for result in results for tensor in _leaves(result)]
    ones = [torch.ones_like(result) for result in results]
    return partial(torch.autograd.grad, results, inputs, ones, retain_graph=True)  # type: ignore[return-value]


def _row(case: OperatorCase, dtype: Dtype, direction: str, seconds: float) -> dict[str, Any]:
    is_backward = direction == "backward"
    elements = case.backward_elements if is_backward else case.elements
    return {
        "operator": case.operator,
        "direction": direction,
        "dtype": dtype,
        "shape": case.shape,
        "layout": case.layout,
        "flops": float(case.backward_flops if is_backward else case.flops),
        "bytes": float(elements * TORCH_DTYPES[dtype].itemsize + case.integer_bytes),
        "seconds": seconds,
    }


def _leaves(result: Tensor) -> list[Tensor]:
    """Returns the leaf tensors that require a gradient and that the result was computed from."""
    leaves: list[Tensor] = []
    seen, waiting = set(), [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.append(variable)
        waiting += [following for following, _ in node.next_functions]
    return leaves
