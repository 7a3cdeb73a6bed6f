"""`StepState`: what a forward and a backward pass change besides their result, to be put back if they fail half-way.

Only buffers, gradients and random generators: weights change in the optimizer's step, which comes later.
"""

import random

import numpy as np
import torch
from torch import Tensor, nn


class StepState:
    """The buffers of a module, the gradients of its parameters, and the states of the random generators, as they are
    when the object is made."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        # With the tensors themselves, because a forward pass may put new tensors into their place.
        self._buffers = [
            (owner, name, buffer, buffer.detach().clone())
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._gradients = [
            (parameter, parameter.grad, None if parameter.grad is None else parameter.grad.detach().clone())
            for parameter in module.parameters()
        ]
        self._host = HostRandomness()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._device = device

    def restore(self) -> None:
        for owner, name, buffer, value in self._buffers:
            buffer.data.copy_(value)  # not counted by autograd as a change
            owner._buffers[name] = buffer
        for parameter, gradient, copy in self._gradients:
            if gradient is not None and copy is not None:
                gradient.data.copy_(copy)
            parameter.grad = gradient
        self._host.restore()
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)

    def keep_buffers(self) -> None:
        """Copies what a forward pass has put into the place of a buffer into that buffer."""
        for owner, name, buffer, _ in self._buffers:
            new = owner._buffers.get(name)
            if isinstance(new, Tensor) and new is not buffer:
                buffer.data.copy_(new.detach())
                owner._buffers[name] = buffer


class HostRandomness:
    """The states of torch's generator on the host, of `random` and of NumPy, when the object is made."""

    def __init__(self) -> None:
        self._torch = torch.default_generator.get_state()
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)

    def restore(self) -> None:
        torch.default_generator.set_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)

    def has_changed(self) -> bool:
        """Whether a random number was drawn since, from any of the three."""
        ours, now = self._numpy["state"], np.random.get_state(legacy=False)["state"]
        is_same = ours["pos"] == now["pos"] and bool((ours["key"] == now["key"]).all())
        return (
            not torch.equal(self._torch, torch.default_generator.get_state())
            or self._python != random.getstate()
            or not is_same
        )
