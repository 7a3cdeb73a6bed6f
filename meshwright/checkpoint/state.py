"""What a checkpoint holds: every tensor under its parameter's name, so that it loads under any plan.

The keys are `model/<name>`, `optimizer/<parameter name>/<entry>`, and the names of a few small objects.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from meshwright.errors import CheckpointError

State = dict[str, Any]
GROUPS = "optimizer_groups"


def model_state(module: nn.Module) -> State:
    return {f"model/{name}": value for name, value in module.state_dict().items()}


def optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    names = _names(module)
    state: State = {}
    for parameter, entries in optimizer.state.items():
        for key, value in entries.items():
            if value is not None:
                state[f"optimizer/{names[id(parameter)]}/{key}"] = value
    state[GROUPS] = [
        {
            **{k: v for k, v in group.items() if k != "params"},
            "names": [names[id(p)] for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    return state


def optimizer_template(module: nn.Module, metadata: Metadata) -> State:
    """Empty tensors for the optimizer entries that a checkpoint holds of this model's parameters."""
    parameters = dict(module.named_parameters())
    template: State = {}
    for key, about in metadata.state_dict_metadata.items():
        kind, _, rest = key.partition("/")
        name = rest.rpartition("/")[0]
        if kind != "optimizer" or name not in parameters:
            continue
        if not isinstance(about, TensorStorageMetadata):
            template[key] = None
        elif about.size == parameters[name].shape:
            template[key] = torch.empty_like(parameters[name], dtype=about.properties.dtype, requires_grad=False)
        else:
            template[key] = torch.empty(about.size, dtype=about.properties.dtype)
    return template


def restore_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    """Puts loaded entries and options into an optimizer whose groups may be cut differently."""
    saved_options = {name: group for group in state[GROUPS] for name in group["names"]}
    names = _names(module)
    numbers: dict[str, int] = {}
    groups = []
    for group in optimizer.param_groups:
        group_names = [names[id(p)] for p in group["params"]]
        missing = [name for name in group_names if name not in saved_options]
        if missing:
            raise CheckpointError(
                f"the checkpoint's optimizer does not hold {missing[0]}: its job trained other parameters"
            )
        for name in group_names:
            numbers[name] = len(numbers)
        options = {k: v for k, v in saved_options[group_names[0]].items() if k != "names"}
        groups.append({**options, "params": [numbers[name] for name in group_names]})
    entries: dict[int, dict[str, Any]] = {}
    for key, value in state.items():
        if key.startswith("optimizer/"):
            name, _, entry = key.removeprefix("optimizer/").rpartition("/")
            if name in numbers:
                entries.setdefault(numbers[name], {})[entry] = value
    optimizer.load_state_dict({"state": entries, "param_groups": groups})


def check_model(module: nn.Module, metadata: Metadata) -> None:
    """Names the first tensor in which the checkpoint and the model differ."""
    saved = {
        key.removeprefix("model/"): about
        for key, about in metadata.state_dict_metadata.items()
        if key.startswith("model/")
    }
    for name, value in module.state_dict().items():
        if name not in saved:
            raise CheckpointError(f"the checkpoint has no {name}, which the model has: it is of another model")
        about = saved[name]
        if isinstance(value, Tensor) and isinstance(about, TensorStorageMetadata) and about.size != value.shape:
            raise CheckpointError(
                f"{name} is {tuple(about.size)} in the checkpoint, but {tuple(value.shape)} in the model"
            )
    extra = sorted(set(saved) - set(module.state_dict()))
    if extra:
        raise CheckpointError(f"the checkpoint holds {extra[0]}, which the model has not: it is of another model")


def _names(module: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in module.named_parameters()}
