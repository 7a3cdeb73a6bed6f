"""Builds optimizers and their parameter groups by parameter name, so that they can be rebuilt under any plan."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.errors import InputError, did_you_mean
from meshwright.messages.exchange import all_gather_values
from meshwright.parallel.model import ParallelModel
from meshwright.parallel.weights.offload import state_device
from meshwright.plan import Plan
from meshwright.profile.optimizer import is_elementwise
from meshwright.train.loop_checks.optimizer_trial import check_optimizer_on_parts
from meshwright.train.shares.check import check_optimizer
from meshwright.user.call import build
from meshwright.user.job_sections import Optimizer

ParameterGroup = dict[str, Any]  # "names" of parameters, and the group's options


def build_optimizer(spec: Optimizer, module: nn.Module) -> torch.optim.Optimizer:
    """Builds the job's optimizer for all parameters of the module that are not frozen."""
    return optimizer_for_parameters(spec, optimizer_groups(spec, module), dict(module.named_parameters()))


def optimizer_groups(spec: Optimizer, module: nn.Module) -> list[ParameterGroup]:
    """Returns the parameter groups of the whole model, with parameters by name. Call it before a plan divides the
    model."""
    trainable = [name for name, p in module.named_parameters() if p.requires_grad]
    if not trainable:
        raise InputError("nothing is left to train: every parameter is frozen")
    return parameter_groups(_group_specs(spec), module, trainable)


def optimizer_for_parameters(
    spec: Optimizer, groups: Sequence[ParameterGroup], parameters: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer:
    """Builds the job's optimizer for the parameters that a rank holds. Every rank has all `groups`, even those of which
    it holds no parameter, so that a learning-rate schedule works alike on all ranks."""
    optimizer = build(spec, [_with_parameters(group, parameters) for group in groups], role="optimizer")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"optimizer: {spec.call} makes a {type(optimizer).__name__}, not a torch optimizer")
    for group_spec in _group_specs(spec):  # checked here, since torch accepts any key in a group
        for option in group_spec if isinstance(group_spec, Mapping) else ():
            if option != "match" and option not in optimizer.defaults:
                near = did_you_mean(option, optimizer.defaults)
                raise InputError(f"optimizer.groups: {spec.call} has no option '{option}'{near}")
    _check_parameters(optimizer, parameters, spec.call)
    return optimizer


def _group_specs(spec: Optimizer) -> Sequence[str | Mapping[str, Any]]:
    """The job's `optimizer.groups` as a list."""
    return spec.groups if isinstance(spec.groups, list) else [spec.groups]


def parameter_groups(
    specs: Sequence[str | Mapping[str, Any]], module: nn.Module, names: Sequence[str]
) -> list[ParameterGroup]:
    """Divides parameter names into groups by the job's `optimizer.groups`. A name belongs to the first spec whose
    `match` fits it. Names that fit no spec form a group of their own, which comes first in the result. With the spec
    `no_decay`, vectors and scalars get groups without weight decay."""
    rest: ParameterGroup = {"names": list(names)}
    groups: list[ParameterGroup] = []
    for spec in specs:
        if isinstance(spec, str):
            continue
        options = dict(spec)
        pattern = options.pop("match", None)
        if not isinstance(pattern, str):
            raise InputError(f"optimizer.groups: {dict(spec)} has no 'match', the pattern of parameter names")
        matched = [name for name in rest["names"] if matches(name, pattern)]
        if not matched:
            raise InputError(
                f"optimizer.groups: '{pattern}' matches no trainable parameter{did_you_mean(pattern, names)}"
            )
        rest["names"] = [name for name in rest["names"] if name not in set(matched)]
        groups.append({"names": matched, **options})
    groups = [group for group in [rest, *groups] if group["names"]]
    return _split_no_decay(groups, module) if "no_decay" in specs else groups


def rebuild_optimizer(
    template: torch.optim.Optimizer, names: Mapping[int, str], parameters: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer:
    """Builds an optimizer of the template's class, groups and options for the parameters that a rank holds. `names`
    maps the ids of the template's parameters to their names."""
    groups = []
    for group in template.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                shape = tuple(parameter.shape)
                raise InputError(f"the optimizer holds a parameter of shape {shape} that the model does not have")
        group_names = [names[id(p)] for p in group["params"]]
        groups.append({**group, "params": [parameters[name] for name in group_names if name in parameters]})
    try:
        optimizer = type(template)(groups, **_constructor_options(template))
    except TypeError as error:
        raise InputError(
            f"the optimizer {type(template).__name__} cannot be made again for the parameters of a rank: {error}. Keep"
            " its other arguments as options of its parameter groups, or give them defaults"
        ) from error
    _check_parameters(optimizer, parameters, type(template).__name__)
    return optimizer


def checked_optimizer(
    make: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer], parallel: ParallelModel
) -> torch.optim.Optimizer:
    """Makes the optimizer of the parameters that a rank holds. Raises an `InputError` if it may not update parts of
    weights as the plan has divided them. All ranks call this together."""
    parameters = parallel.parameters()
    optimizer = make(parameters)
    problem = ""
    try:
        check_optimizer_on_parts(optimizer, parameters, parallel.layouts)
    except InputError as error:
        problem = str(error)
    if not is_elementwise(optimizer) and parallel.plan.world_size > 1:  # pipeline stages have other weights
        problem = next(filter(None, all_gather_values(problem)), "")
    if problem:
        raise InputError(problem)
    return optimizer


def _check_parameters(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], name: str) -> None:
    """Raises an `InputError` if the optimizer, which `name` has made, holds other tensors than these parameters. It
    would train them instead of the model, and could not be saved. It need not hold all of the parameters."""
    known = {id(parameter) for parameter in parameters.values()}
    for number, group in enumerate(optimizer.param_groups):
        foreign = sum(id(parameter) not in known for parameter in group["params"])
        if foreign:
            raise InputError(
                f"optimizer: {name}: {foreign} of {len(group['params'])} tensors in parameter group {number} are not"
                " parameters of the model: make the optimizer of the parameter groups that it is called with"
            )


# torch.optim.Adagrad has fused kernels for CPUs only.
_FUSED_ON_GPUS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def can_fuse_on_gpus(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer has fused kernels on GPUs for its parameters, and its options do not say which
    implementation it uses."""
    options = (optimizer.defaults, *optimizer.param_groups)
    return (
        type(optimizer) in _FUSED_ON_GPUS
        and all(option["fused"] is None and option["foreach"] is None for option in options)
        and not any(option["differentiable"] for option in options)
        and all(parameter.is_floating_point() for group in optimizer.param_groups for parameter in group["params"])
    )


def use_fused_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Makes the optimizer use its fused kernels, which update many weights at once. Warns if it has none."""
    if "fused" not in optimizer.defaults:
        warnings.warn(
            f"plan.compute.fused_optimizer: {type(optimizer).__name__} has no fused implementation, and runs without",
            stacklevel=2,
        )
        return
    for options in (optimizer.defaults, *optimizer.param_groups):
        options["fused"], options["foreach"] = True, False
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), torch.Tensor):  # unfused implementations keep it on the host
            state["step"] = state["step"].to(state_device(optimizer, parameter), torch.float32)


def choose_kernels(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Makes the optimizer use the kernels of the plan, or those that its weights need."""
    check_optimizer(plan, optimizer)
    if plan.compute.fused_optimizer:
        use_fused_kernels(optimizer)
    else:
        _update_meshes_one_by_one(optimizer)


def _update_meshes_one_by_one(optimizer: torch.optim.Optimizer) -> None:
    """Makes the optimizer update the weights of a group one by one if they lie on different meshes, as divided experts
    and other sharded weights do: its kernels for many weights at once, which it uses on GPUs, refuse such lists."""
    for group in optimizer.param_groups:
        meshes = {weight.device_mesh if isinstance(weight, DTensor) else None for weight in group["params"]}
        if len(meshes) > 1 and "foreach" in group:
            group["foreach"] = False


def matches(name: str, pattern: str) -> bool:
    """Whether a parameter's name matches a pattern. `head` and `head.*` both match everything below `head`."""
    return fnmatch(name, pattern) or name.startswith(pattern + ".")


def _constructor_options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parameters = inspect.signature(type(optimizer)).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in parameters}


def _with_parameters(group: ParameterGroup, parameters: Mapping[str, nn.Parameter]) -> ParameterGroup:
    options = {key: value for key, value in group.items() if key != "names"}
    return {"params": [parameters[name] for name in group["names"] if name in parameters], **options}


def _split_no_decay(groups: Sequence[ParameterGroup], module: nn.Module) -> list[ParameterGroup]:
    """Splits each group in two, so that norms and biases, that is all vectors and scalars, have no weight decay."""
    vectors = {name for name, p in module.named_parameters() if p.dim() <= 1}
    split: list[ParameterGroup] = []
    for group in groups:
        decayed = [name for name in group["names"] if name not in vectors]
        not_decayed = [name for name in group["names"] if name in vectors]
        if decayed:
            split.append({**group, "names": decayed})
        if not_decayed:
            split.append({**group, "names": not_decayed, "weight_decay": 0.0})
    return split


def call_around_steps(optimizer: torch.optim.Optimizer, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Calls these methods before and after each step of the optimizer, without keeping their object alive."""
    before_step, after_step = WeakMethod(before), WeakMethod(after)
    optimizer.register_step_pre_hook(lambda *_: method() if (method := before_step()) else None)
    optimizer.register_step_post_hook(lambda *_: method() if (method := after_step()) else None)
