"""Optimizer state in CPU memory (`plan.memory.offload: optimizer`): the weights of a GPU rank stay on the GPU, and the
optimizer's state and step are on the CPU. A step of the optimizer then is:

    weights, gradients → CPU memory        copies in page-locked memory, which are reused in every step
    step                                   on these copies, with state in CPU memory
    weights            → GPU               while the host goes on; the next forward pass waits for them on the device

Weights are copied from the GPU in every step, so that a step begins with the weights that the model has, whoever has
changed them since the last one: a checkpoint, a callback, or an average over replicas.

The optimizer has the parameters of the model, and its state is saved under them, as without offload. Only during a step
(`on_host`) its groups hold the copies. With `offload: parameters`, FSDP2 itself keeps shards in CPU memory (shard.py),
and an optimizer works on them as it is.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.errors import InputError
from meshwright.parallel.torch_private import step_without_hooks, with_local_tensor
from meshwright.parallel.weights.layout import local_tensor
from meshwright.plan import Plan

CPU = torch.device("cpu")
_ATTRIBUTE = "host_copies"  # of an optimizer whose step runs on copies in CPU memory


def offloads_parameters(plan: Plan, device_type: str) -> bool:
    """Whether FSDP2 keeps the shards in CPU memory. On CPU ranks they are there anyway."""
    return plan.memory.offload == "parameters" and device_type != "cpu"


def offload_optimizer(optimizer: torch.optim.Optimizer, plan: Plan, device: torch.device) -> None:
    """Makes the optimizer step in CPU memory if the plan says so and the rank's device is not the CPU itself."""
    if plan.memory.offload == "optimizer" and device.type != "cpu":
        step_on_host(optimizer)


def step_on_host(optimizer: torch.optim.Optimizer) -> None:
    """Makes the optimizer step on copies of its parameters in CPU memory, and keep its state there. Its hooks are
    called before and after with the parameters of the model."""
    copies = HostCopies(optimizer)
    setattr(optimizer, _ATTRIBUTE, copies)
    original = step_without_hooks(optimizer)

    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:
            raise InputError(
                f"{type(self).__name__}.step was called with a closure, which computes gradients on the GPU during the"
                " step, but plan.memory.offload is optimizer, whose step runs in CPU memory: set it to none"
            )
        with copies.in_step():
            return original(self)

    # A method, because learning-rate schedules look for its function.
    optimizer.step = MethodType(torch.optim.Optimizer.profile_hook_step(step), optimizer)  # type: ignore[method-assign]


def host_copies(optimizer: torch.optim.Optimizer) -> "HostCopies | None":
    """The copies on which the optimizer steps; None if it steps on the parameters of the model."""
    copies = getattr(optimizer, _ATTRIBUTE, None)
    return copies if isinstance(copies, HostCopies) else None


def state_device(optimizer: torch.optim.Optimizer | None, parameter: Tensor) -> torch.device:
    """The device on which the optimizer keeps the state of a parameter."""
    return CPU if optimizer is not None and host_copies(optimizer) else parameter.device


class HostCopies:
    """Copies in CPU memory of an optimizer's parameters and of their gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._weights: dict[Tensor, nn.Parameter] = {}  # by parameter of the model
        self._gradients: dict[Tensor, Tensor] = {}

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Within this context, the optimizer's groups hold copies of the parameters, with their gradients. Afterwards
        the weights are copied back. After an error they are not."""
        used = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        for parameter in used:
            self._copy_gradient(parameter)
            _local(self._weight(parameter)).copy_(_local(parameter), non_blocking=True)
        _wait_for_device(used)
        with self.on_host():
            yield
        for parameter in used:
            _local(parameter).copy_(_local(self._weight(parameter)), non_blocking=True)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Within this context, the optimizer's groups and state hold copies in place of the model's parameters. The
        values of the copies are those of the last step."""
        groups, state = self._optimizer.param_groups, self._optimizer.state
        parameters = [list(group["params"]) for group in groups]
        originals = {self._weight(parameter): parameter for of_group in parameters for parameter in of_group}
        for group, of_group in zip(groups, parameters, strict=True):
            group["params"] = [self._weight(parameter) for parameter in of_group]
        for copy, parameter in originals.items():
            if parameter in state:
                state[copy] = state.pop(parameter)
        try:
            yield
        finally:
            # Loading a state replaces the optimizer's lists and its state.
            groups, state = self._optimizer.param_groups, self._optimizer.state
            for group, of_group in zip(groups, parameters, strict=True):
                group["params"] = of_group
            for copy, parameter in originals.items():
                copy.grad = None
                if copy in state:
                    state[parameter] = state.pop(copy)

    def _weight(self, parameter: Tensor) -> nn.Parameter:
        if parameter not in self._weights:
            self._weights[parameter] = nn.Parameter(_empty_copy(parameter), parameter.requires_grad)
        return self._weights[parameter]

    def _copy_gradient(self, parameter: Tensor) -> None:
        """Gives the copy of a parameter a copy of its gradient."""
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout != torch.strided:  # sparse: the number of its rows changes from step to step
            self._weight(parameter).grad = gradient.to(CPU)
            return
        if parameter not in self._gradients:
            self._gradients[parameter] = _empty_copy(gradient)
        copy = self._gradients[parameter]
        _local(copy).copy_(_local(gradient), non_blocking=True)
        self._weight(parameter).grad = copy


def _local(tensor: Tensor) -> Tensor:
    return local_tensor(tensor.detach())


def _empty_copy(tensor: Tensor) -> Tensor:
    """A tensor in page-locked CPU memory with the shape, dtype and division of another one."""
    local = torch.empty_like(_local(tensor), device=CPU, pin_memory=torch.cuda.is_available())
    return with_local_tensor(tensor, local) if isinstance(tensor, DTensor) else local


def _wait_for_device(parameters: list[Tensor]) -> None:
    """Waits until copies to the CPU have arrived."""
    for device in {_local(parameter).device for parameter in parameters} - {CPU}:
        torch.get_device_module(device.type).current_stream(device).synchronize()
