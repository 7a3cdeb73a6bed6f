"""Converts between the shards that a rank holds and the whole tensors that the checkpoints of other libraries have. For
models whose layers are split, there is transformers/whole_states.py."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.parallel.weights.layout import fill_local_shard, gather_parameter


def whole_tensor(value: Any) -> Any:
    """The whole of a tensor of which this rank has a shard, on the CPU; any other value as it is. All ranks call this
    together."""
    if not isinstance(value, DTensor):
        return value
    with torch.no_grad():
        return gather_parameter(value.detach(), None, None).to("cpu", copy=True)


def load_whole_tensor(value: Any, like: Any) -> Any:
    """The part of a whole tensor that `like`, a parameter of this rank, has; any other value as it is."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != like.shape:
        return value  # an optimizer's entry of another shape, or a tensor that `load_state_dict` refuses
    shard = torch.empty_like(like, dtype=value.dtype, requires_grad=False)
    with torch.no_grad():
        fill_local_shard(shard, None, value)
    return shard


def whole_optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's `state_dict` with whole tensors, on every rank. All ranks call this together."""
    state = optimizer.state_dict()
    entries = {
        number: {name: whole_tensor(value) for name, value in entry.items()} for number, entry in state["state"].items()
    }
    return {**state, "state": entries}


def divide_loaded_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Returns a `state_dict` with whole tensors as `optimizer.load_state_dict` needs it, if a rank's parameters are
    shards."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    entries = {
        number: {name: load_whole_tensor(value, parameters[number]) for name, value in entry.items()}
        for number, entry in state["state"].items()
    }
    return {**state, "state": entries}
