"""Starts operations: checks the tensors of a call, makes the request, and returns a handle. `poll` and `synchronize`
take it."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.compat.horovod.engine import requests
from meshwright.compat.horovod.engine.operation import Operation, dtype_name
from meshwright.compat.horovod.engine.requests import ReduceOp, Request
from meshwright.compat.horovod.process_sets import ProcessSet, global_process_set, registered_ranks
from meshwright.compat.horovod.state import horovod

Average, Sum, Adasum = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT

_REDUCED = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
_MOVED = (*_REDUCED, torch.bool)


def start(
    kind: str,
    inputs: Sequence[Tensor],
    outputs: list[Tensor],
    name: str | None,
    process_set: ProcessSet,
    **fields: Any,
) -> int:
    """Starts an operation on tensors, and returns its handle. `fields` are those of `Request`."""
    registered_ranks(process_set.process_set_id)
    if not process_set.included():
        raise ValueError(f"rank {horovod.placement.rank} called {kind} on {process_set}, which it is not in")
    types = _REDUCED if kind in (requests.ALLREDUCE, requests.REDUCESCATTER) else _MOVED
    for tensor in inputs:
        if tensor.dtype not in types or tensor.layout != torch.strided:
            raise ValueError(f"{kind} takes no tensors of {dtype_name(tensor.dtype)} with layout {tensor.layout}")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{kind} needs contiguous tensors: call .contiguous() on that of shape {list(tensor.shape)}"
            )
        if tensor.device.type not in ("cpu", "cuda"):
            raise ValueError(f"{kind} takes tensors on the CPU or on a GPU, and this one is on {tensor.device}")
    devices = {tensor.device.type for tensor in inputs}
    if len(devices) > 1:
        raise RuntimeError(f"{kind}: the tensors of one group are on {', '.join(sorted(devices))}, not on one device")
    assert process_set.process_set_id is not None
    request = Request(
        kind,
        name if name is not None else horovod.unnamed(process_set.process_set_id),
        process_set.process_set_id,
        dtypes=tuple(dtype_name(tensor.dtype) for tensor in inputs),
        shapes=tuple(tuple(tensor.shape) for tensor in inputs),
        device=devices.pop() if devices else "cpu",
        **fields,
    )
    return horovod.start(
        Operation(request, [tensor.detach() for tensor in inputs], [tensor.detach() for tensor in outputs])
    )


def check_reduce_op(op: ReduceOp | int | None, average: bool | None) -> ReduceOp:
    """Returns the reduce operation of a call that has the argument `op` or the older one, `average`."""
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn(
            "Parameter `average` has been replaced with `op` and will be removed in v1.0",
            DeprecationWarning,
            stacklevel=5,
        )
        return Average if average else Sum
    return Average if op is None else ReduceOp(op)


def check_adasum(process_set: ProcessSet) -> None:
    if process_set.process_set_id != global_process_set.process_set_id:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    count = horovod.placement.size
    if count & (count - 1):
        raise NotImplementedError(f"Adasum combines ranks in pairs, so their number is a power of 2, not {count}.")


def poll(handle: int) -> bool:
    """Whether an operation is finished, so that `synchronize` returns at once."""
    return horovod.poll(handle)


def synchronize(handle: Any) -> Any:
    """Waits for an operation, and returns its result: a tensor, or a tuple of them for grouped operations and
    all-to-all. Returns None for a handle that was synchronized already."""
    operation = horovod.finish(handle)
    if operation is None:
        return None
    result = _results.pop(handle, None)
    return result(operation) if result is not None else operation.outputs[0] if operation.outputs else None


def keep_result(handle: int, result: Any) -> int:
    """Lets `synchronize` return what this function makes of the operation."""
    _results[handle] = result
    return handle


_results: dict[int, Any] = {}
