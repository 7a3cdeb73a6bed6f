"""An optimizer and its parameter groups, made by parameter name, so that any plan can make it again."""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn

from meshwright.call import build
from meshwright.errors import InputError, did_you_mean
from meshwright.job import Optimizer

Group = dict[str, Any]  # "names" and the group's own options


def build_optimizer(spec: Optimizer, module: nn.Module) -> torch.optim.Optimizer:
    """The job's optimizer on the parameters that are not frozen."""
    return optimizer_on(spec, optimizer_groups(spec, module), dict(module.named_parameters()))


def optimizer_groups(spec: Optimizer, module: nn.Module) -> list[Group]:
    """The groups of the whole model, before a plan gives a rank its part of it."""
    trainable = [name for name, p in module.named_parameters() if p.requires_grad]
    if not trainable:
        raise InputError("nothing is left to train: every parameter is frozen")
    return parameter_groups(_words(spec), module, trainable)


def optimizer_on(
    spec: Optimizer, groups: Sequence[Group], parameters: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer on those of the groups' parameters that a rank holds. Every rank has every group, so that a
    schedule finds them all."""
    made = build(spec, [_with_parameters(group, parameters) for group in groups], role="optimizer")
    if not isinstance(made, torch.optim.Optimizer):
        raise InputError(f"optimizer: {spec.call} makes a {type(made).__name__}, not a torch optimizer")
    for word in _words(spec):  # torch takes any key in a group
        for option in word if isinstance(word, Mapping) else ():
            if option != "match" and option not in made.defaults:
                near = did_you_mean(option, made.defaults)
                raise InputError(f"optimizer.groups: {spec.call} has no option '{option}'{near}")
    return made


def _words(spec: Optimizer) -> Sequence[str | Mapping[str, Any]]:
    return spec.groups if isinstance(spec.groups, list) else [spec.groups]


def parameter_groups(words: Sequence[str | Mapping[str, Any]], module: nn.Module, names: Sequence[str]) -> list[Group]:
    """Splits parameter names into groups. A name goes to the first `match` that fits it, or to the rest."""
    rest: Group = {"names": list(names)}
    groups: list[Group] = []
    for word in words:
        if isinstance(word, str):
            continue
        options = dict(word)
        pattern = options.pop("match", None)
        if not isinstance(pattern, str):
            raise InputError(f"optimizer.groups: {dict(word)} has no 'match', the pattern of parameter names")
        matched = [name for name in rest["names"] if matches(name, pattern)]
        if not matched:
            raise InputError(
                f"optimizer.groups: '{pattern}' matches no trainable parameter{did_you_mean(pattern, names)}"
            )
        rest["names"] = [name for name in rest["names"] if name not in set(matched)]
        groups.append({"names": matched, **options})
    groups = [group for group in [rest, *groups] if group["names"]]
    return _split_no_decay(groups, module) if "no_decay" in words else groups


def rebuild_optimizer(
    template: torch.optim.Optimizer, names: Mapping[int, str], parameters: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer:
    """The same optimizer on the parameters that a rank holds. `names` tells what the template's parameters (by
    identity) are called."""
    groups = []
    for group in template.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                shape = tuple(parameter.shape)
                raise InputError(f"the optimizer holds a parameter of shape {shape} that the model has not")
        wanted = [names[id(p)] for p in group["params"]]
        groups.append({**group, "params": [parameters[name] for name in wanted if name in parameters]})
    return type(template)(groups, **_constructor_options(template))


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Has one kernel update many weights, where the optimizer knows how to."""
    if "fused" not in optimizer.defaults:
        warnings.warn(
            f"plan.compute.fused_optimizer: {type(optimizer).__name__} has no fused form, and runs as it is",
            stacklevel=2,
        )
        return
    for options in (optimizer.defaults, *optimizer.param_groups):
        options["fused"], options["foreach"] = True, False
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), torch.Tensor):  # which other forms count on the host
            state["step"] = state["step"].to(parameter.device, torch.float32)


def matches(name: str, pattern: str) -> bool:
    """`head` and `head.*` both name everything below `head`."""
    return fnmatch(name, pattern) or name.startswith(pattern + ".")


def _constructor_options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    known = inspect.signature(type(optimizer)).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in known}


def _with_parameters(group: Group, parameters: Mapping[str, nn.Parameter]) -> Group:
    options = {key: value for key, value in group.items() if key != "names"}
    return {"params": [parameters[name] for name in group["names"] if name in parameters], **options}


def _split_no_decay(groups: Sequence[Group], module: nn.Module) -> list[Group]:
    """Norms and biases, that is all vectors and scalars, go without weight decay."""
    vectors = {name for name, p in module.named_parameters() if p.dim() <= 1}
    split: list[Group] = []
    for group in groups:
        decayed = [name for name in group["names"] if name not in vectors]
        spared = [name for name in group["names"] if name in vectors]
        if decayed:
            split.append({**group, "names": decayed})
        if spared:
            split.append({**group, "names": spared, "weight_decay": 0.0})
    return split
