"""The distributed optimizer with Adasum: each rank makes its own step for each parameter, and the changes of the ranks
are combined with Adasum instead of the gradients."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshwright.compat.horovod.compression import Compressor
from meshwright.compat.horovod.operations.allreduce import allreduce_async_
from meshwright.compat.horovod.operations.start import Adasum, synchronize
from meshwright.compat.horovod.optimizer_parameters import call_when_gradients_are_ready, names_of_parameters


class AdasumMethods:
    """The methods that an optimizer with Adasum has before those of the optimizer's own class."""

    param_groups: list[dict[str, Any]]

    def start_distributing(
        self,
        named_parameters: Iterable[tuple[str, Tensor]] | None,
        compression: type[Compressor],
        backward_passes_per_step: int,
    ) -> None:
        self._parameter_names = names_of_parameters(self.param_groups, named_parameters)
        self._compression = compression
        self.backward_passes_per_step = backward_passes_per_step
        self._passes_left = dict.fromkeys(self._parameter_names, backward_passes_per_step)
        self._started: dict[Tensor, tuple[int, Any, Tensor] | None] = {}  # (handle, context, weights before the step)
        self._trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        self._hooks = call_when_gradients_are_ready(self._trained, self._gradient_is_ready)

    def _gradient_is_ready(self, parameter: Tensor) -> None:
        if self._started.get(parameter) is not None:
            raise AssertionError(
                f"Gradients of {self._parameter_names[parameter]} were computed more than backward_passes_per_step ="
                f" {self.backward_passes_per_step} times before call to step(). Increase backward_passes_per_step to"
                " accumulate gradients locally."
            )
        self._passes_left[parameter] -= 1
        self._started[parameter] = None if self._passes_left[parameter] > 0 else self._start(parameter)

    @torch.no_grad()
    def _start(self, parameter: Tensor) -> tuple[int, Any, Tensor]:
        """Makes this rank's step for one parameter, and starts to combine the change with those of other ranks."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        before = parameter.detach().clone()
        all_parameters = [group["params"] for group in self.param_groups]
        for group, parameters in zip(self.param_groups, all_parameters, strict=True):
            group["params"] = [p for p in parameters if p is parameter]
        try:
            super().step()  # type: ignore[misc]
        finally:
            for group, parameters in zip(self.param_groups, all_parameters, strict=True):
                group["params"] = parameters
        change = (parameter.detach() - before).contiguous()
        compressed, context = self._compression.compress(change)
        return allreduce_async_(compressed, name=self._parameter_names[parameter], op=Adasum), context, before

    def synchronize(self) -> None:
        """Does nothing: the changes are combined in `step`."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        self.backward_passes_per_step = passes
        self._passes_left = dict.fromkeys(self._parameter_names, passes)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter in self._trained:
            if self._started.get(parameter) is None:
                self._started[parameter] = self._start(parameter)
        for parameter, started in self._started.items():
            assert started is not None
            handle, context, before = started
            change = self._compression.decompress(synchronize(handle), context)
            parameter.copy_(before + change)
        self._started.clear()
        self._passes_left = dict.fromkeys(self._parameter_names, self.backward_passes_per_step)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        if any(self._started.values()):
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or"
                " optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(set_to_none)  # type: ignore[misc]
