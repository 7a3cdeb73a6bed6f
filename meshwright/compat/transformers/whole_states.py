"""Converts between the parts of tensors that a rank holds under a plan and the whole tensors in checkpoints of
transformers, so that a checkpoint is the same under every plan."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.parallel.weights.layout import ParameterLayout, fill_local_shard, gather_parameter, whole_shape
from meshwright.parallel.weights.state import full_state
from meshwright.train.session import Session


def divides_weights(session: Session) -> bool:
    """Whether a rank holds only parts of some weights, gradients or optimizer states."""
    return session.plan.world_size > session.plan.axes.replicate or bool(session.parallel.layouts)


def whole_weights(session: Session) -> dict[str, Any]:
    """The model's `state_dict` with whole tensors on rank 0, empty on the other ranks. All ranks call this together."""
    parallel = session.parallel
    return full_state(parallel.module, parallel.layouts, parallel.mesh, order=parallel.state_names, everywhere=False)


def whole_optimizer_state(session: Session, keeps: bool) -> dict[str, Any]:
    """The optimizer's `state_dict` with whole tensors on the CPU. All ranks call this together; those that do not need
    the result (`keeps` is False) get one without entries."""
    session.parallel.reshard()
    state = session.optimizer.state_dict()
    entries: dict[int, dict[str, Any]] = {}
    for number, parameter, layout in _numbered_parameters(session):
        whole = {
            name: _whole(value, parameter, layout, session) for name, value in state["state"].get(number, {}).items()
        }
        if keeps and whole:
            entries[number] = whole
    return {**state, "state": entries}


def load_whole_states(session: Session) -> None:
    """Lets `load_state_dict` of the session's model and optimizer take whole tensors, besides this rank's parts."""
    module = session.module

    def divide_weights(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        session.parallel.reshard()
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for name in [name for name in state if name in parameters]:
            state[name] = _part(state[name], parameters[name], session.parallel.layouts.get(name))

    def divide_entries(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        entries = {
            number: {name: _part(value, parameter, layout) for name, value in state["state"][number].items()}
            for number, parameter, layout in _numbered_parameters(session)
            if number in state["state"]
        }
        return {**state, "state": entries}

    module.register_load_state_dict_pre_hook(divide_weights)
    session.optimizer.register_load_state_dict_pre_hook(divide_entries)


def _numbered_parameters(session: Session) -> list[tuple[int, nn.Parameter, ParameterLayout | None]]:
    """The optimizer's parameters with the numbers that its `state_dict` gives them, and their layouts."""
    names = {id(parameter): name for name, parameter in session.parallel.parameters().items()}
    parameters = [parameter for group in session.optimizer.param_groups for parameter in group["params"]]
    layouts = session.parallel.layouts
    return [(number, p, layouts.get(names[id(p)])) for number, p in enumerate(parameters)]


def _whole(value: Any, parameter: Tensor, layout: ParameterLayout | None, session: Session) -> Any:
    """The whole of a tensor that is divided as the parameter is; any other value as it is."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, DTensor) or (layout is not None and value.shape == parameter.shape):
        value = gather_parameter(value.detach(), layout, session.parallel.mesh)
    return value.to("cpu")


def _part(value: Any, parameter: Tensor, layout: ParameterLayout | None) -> Any:
    """This rank's part of a whole tensor that has the shape of the whole parameter; any other value as it is."""
    if (
        not isinstance(value, Tensor)
        or isinstance(value, DTensor)
        or tuple(value.shape) != whole_shape(parameter, layout)
    ):
        return value
    if layout is None and not isinstance(parameter, DTensor):
        return value
    part = torch.empty_like(parameter.detach(), dtype=value.dtype)
    fill_local_shard(part, layout, value)
    return part
