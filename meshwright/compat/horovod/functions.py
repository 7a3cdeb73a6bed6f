"""Broadcasts of parameters, optimizer states and objects, with which ranks start alike."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.compat.horovod.object_pickle import from_bytes, to_bytes
from meshwright.compat.horovod.operations.allgather import allgather_async
from meshwright.compat.horovod.operations.broadcast import broadcast_, broadcast_async_
from meshwright.compat.horovod.operations.start import synchronize
from meshwright.compat.horovod.process_sets import ProcessSet, global_process_set
from meshwright.compat.horovod.state import horovod


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Replaces parameters by those of the root rank: a `state_dict`, `named_parameters()`, or a list of tensors."""
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, Tensor):
        named = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    handles = []
    for name, tensor in named:
        if isinstance(tensor, Tensor):
            handles.append((tensor, *_broadcast_in_place(tensor, root_rank, name)))
    for tensor, contiguous, handle in handles:
        synchronize(handle)
        if contiguous is not tensor:
            with torch.no_grad():
                tensor.copy_(contiguous)


def _broadcast_in_place(tensor: Tensor, root_rank: int, name: str | None) -> tuple[Tensor, int]:
    contiguous = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
    return contiguous, broadcast_async_(contiguous, root_rank, name)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: nn.Module | None = None) -> None:
    """Replaces the state and the options of an optimizer by those of the root rank. If there is no state yet, gradients
    become zeros, as with Horovod, which makes a step with them for the state; here the first step of the training does.
    `model` tells which parameters have sparse gradients; they get none."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    if not optimizer.state:
        _zero_missing_gradients(optimizer, model)
    states = {key: value for key, value in optimizer.state_dict().items() if key in ("state", "param_groups")}
    received = broadcast_object(_on_cpu(states), root_rank, "optimizer_state")
    if horovod.placement.rank != root_rank:
        load: Any = torch.optim.Optimizer.load_state_dict
        load(optimizer, received)


def _zero_missing_gradients(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> None:
    if isinstance(optimizer, torch.optim.SparseAdam):
        return
    modules = model.modules() if model is not None else ()
    sparse = {module.weight for module in modules if isinstance(module, nn.Embedding) and module.sparse}
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter.requires_grad and parameter.grad is None and parameter not in sparse:
            parameter.grad = torch.zeros_like(parameter)


def _on_cpu(value: Any) -> Any:
    """Returns a nested state with its tensors on the CPU: each rank moves them to its own device."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(entry) for key, entry in value.items()}
    return [_on_cpu(entry) for entry in value] if type(value) is list else value


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns the object of the root rank."""
    title = name or type(obj).__name__
    is_root = horovod.placement.rank == root_rank
    data = to_bytes(obj) if is_root else torch.empty(0, dtype=torch.uint8, device="cpu")
    size = torch.tensor([data.numel()], dtype=torch.int64, device="cpu")
    broadcast_(size, root_rank, f"{title}.sz", process_set)
    if not is_root:
        data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    broadcast_(data, root_rank, f"{title}.t", process_set)
    return obj if is_root else from_bytes(data)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Returns the objects of all ranks, in their order."""
    title = name or type(obj).__name__
    data = to_bytes(obj)
    size = torch.tensor([data.numel()], dtype=torch.int64, device="cpu")
    size_handle = allgather_async(size, f"{title}.sz", process_set)
    data_handle = allgather_async(data, f"{title}.t", process_set)
    sizes, gathered = synchronize(size_handle).tolist(), synchronize(data_handle)
    return [from_bytes(piece) for piece in gathered.split(sizes)]
