"""`DistributedOptimizer`: an optimizer whose gradients are averaged over the ranks before each step. The all-reduce of
a gradient starts as soon as the backward pass has computed it."""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshwright.compat.horovod.adasum_optimizer import AdasumMethods
from meshwright.compat.horovod.basics import local_size, rocm_built, size
from meshwright.compat.horovod.compression import Compression, Compressor
from meshwright.compat.horovod.engine.requests import ReduceOp
from meshwright.compat.horovod.functions import broadcast_object
from meshwright.compat.horovod.operations.allreduce import (
    allreduce_async_,
    grouped_allreduce_async_,
    sparse_allreduce_async,
)
from meshwright.compat.horovod.operations.start import Adasum, Average, synchronize
from meshwright.compat.horovod.optimizer_parameters import (
    Groups,
    call_when_gradients_are_ready,
    check_groups,
    group_parameters,
    names_of_parameters,
)
from meshwright.compat.horovod.process_sets import ProcessSet, global_process_set
from meshwright.compat.horovod.state import horovod
from meshwright.compat.horovod.variables import read_horovod_variables

# A started all-reduce: its handle or, for a sparse gradient, the function that waits; and what decompresses it. None
# stands for a gradient of a backward pass after which nothing is reduced yet.
_Started = tuple[Any, Any] | None


class DistributedMethods:
    """The methods that a distributed optimizer has before those of the optimizer's own class."""

    param_groups: list[dict[str, Any]]

    def start_distributing(
        self,
        named_parameters: Iterable[tuple[str, Tensor]] | None,
        compression: type[Compressor],
        backward_passes_per_step: int,
        op: ReduceOp,
        gradient_predivide_factor: float,
        groups: Groups,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        check_groups(groups)
        self._parameter_names = names_of_parameters(self.param_groups, named_parameters)
        self._compression = compression
        self.backward_passes_per_step = backward_passes_per_step
        self._passes_left = dict.fromkeys(self._parameter_names, backward_passes_per_step)
        self.op, self.process_set, self.sparse_as_dense = op, process_set, sparse_as_dense
        self.gradient_predivide_factor = gradient_predivide_factor
        self._started: dict[Tensor, _Started] = {}
        self._started_groups: dict[tuple[Tensor, ...], tuple[Any, list[Any]]] = {}
        self._trained: list[Tensor] = []
        self._hooks: list[Any] = []
        self._synchronized, self._should_synchronize = False, True
        self._ready = 0  # the number of parameters whose gradients are complete
        self._waits_for_all = False
        self._group_of: dict[Tensor, tuple[Tensor, ...]] = {}
        self._groups = groups
        if process_set.included() and (size() > 1 or read_horovod_variables().elastic):
            self._add_hooks()

    def _add_hooks(self) -> None:
        self._trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        busy_cores = local_size() * torch.get_num_threads()
        on_cpu = all(p.device.type == "cpu" for p in self._trained)
        self._waits_for_all = on_cpu and (os.cpu_count() or 1) < busy_cores + local_size()
        if self._groups is not None:
            # All ranks form the groups in the order of one of them.
            assert self.process_set.ranks is not None
            root = self.process_set.ranks[0]
            names = [self._parameter_names[p] for p in self._trained]
            order = broadcast_object(names, root, "DistributedOptimizer.groups", self.process_set)
            ordered = sorted(self._trained, key=lambda p: order.index(self._parameter_names[p]))
            for group in group_parameters(self._groups, ordered):
                self._group_of.update(dict.fromkeys(group, group))
        self._hooks = call_when_gradients_are_ready(self._trained, self._gradient_is_ready)

    def _gradient_is_ready(self, parameter: Tensor) -> None:
        if self._started.get(parameter) is not None or parameter in self._reduced_in_groups():
            raise AssertionError(
                f"Gradients of {self._parameter_names[parameter]} were computed more than backward_passes_per_step ="
                f" {self.backward_passes_per_step} times before call to step(). Increase backward_passes_per_step to"
                " accumulate gradients locally."
            )
        self._passes_left[parameter] -= 1
        self._started[parameter] = None
        if self._passes_left[parameter] > 0:
            return
        if self._waits_for_all:
            horovod.engine.defer()
        group = self._group_of.get(parameter)
        if group is None:
            self._started[parameter] = self._start(parameter)
        elif all(p in self._started and self._passes_left[p] == 0 for p in group):
            self._start_group(group)
        self._ready += 1
        if self._ready == len(self._trained):
            horovod.engine.hurry()

    def _reduced_in_groups(self) -> set[Tensor]:
        return {parameter for group in self._started_groups for parameter in group}

    def _factors(self) -> dict[str, float]:
        """An average may be divided partly before the sum, against overflow."""
        if self.op != Average or self.gradient_predivide_factor == 1.0:
            return {}
        factor = self.gradient_predivide_factor
        return {"prescale_factor": 1 / factor, "postscale_factor": factor}

    def _start(self, parameter: Tensor) -> _Started:
        """Starts the all-reduce of a gradient. A parameter without one contributes zeros, because another rank may have
        one."""
        name = self._parameter_names[parameter]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        if gradient.is_sparse:
            if not self.sparse_as_dense:
                return sparse_allreduce_async(gradient, name, self.op, self.process_set), None
            gradient = gradient.to_dense()
        compressed, context = self._compression.compress(gradient.contiguous())
        options = {"op": self.op, "process_set": self.process_set, **self._factors()}
        return allreduce_async_(compressed, name=name, **options), context  # type: ignore[arg-type]

    def _start_group(self, group: tuple[Tensor, ...]) -> None:
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in group]
        dense = [gradient.to_dense() if gradient.is_sparse else gradient.contiguous() for gradient in gradients]
        compressed, contexts = zip(*map(self._compression.compress, dense), strict=True)
        options = {"op": self.op, "process_set": self.process_set, **self._factors()}
        name = self._parameter_names[group[0]]
        handle = grouped_allreduce_async_(compressed, name=name, **options)  # type: ignore[arg-type]
        self._started_groups[group] = (handle, list(contexts))
        for parameter in group:
            self._started.pop(parameter, None)

    def synchronize(self) -> None:
        """Waits until the gradients of all parameters are averaged. Gradients that no backward pass has computed are
        zeros."""
        self._synchronized = True
        if not self.process_set.included() or not self._hooks:
            return
        reduced = self._reduced_in_groups()
        for parameter in self._trained:
            if parameter in reduced or self._started.get(parameter) is not None:
                continue
            group = self._group_of.get(parameter)
            if group is None:
                self._started[parameter] = self._start(parameter)
            else:
                self._start_group(group)
                reduced.update(group)
        for parameter, started in self._started.items():
            assert started is not None
            handle, context = started
            result = handle() if callable(handle) else synchronize(handle)
            self._set_gradient(parameter, result, context)
        for group, (handle, contexts) in self._started_groups.items():
            for parameter, result, context in zip(group, synchronize(handle), contexts, strict=True):
                self._set_gradient(parameter, result, context)
        self._started.clear()
        self._started_groups.clear()
        self._ready = 0
        self._passes_left = dict.fromkeys(self._parameter_names, self.backward_passes_per_step)

    @torch.no_grad()
    def _set_gradient(self, parameter: Tensor, result: Tensor, context: Any) -> None:
        gradient = parameter.grad
        averaged = result if result.is_sparse else self._compression.decompress(result, context)
        if gradient is None:
            parameter.grad = averaged
        elif gradient.is_sparse:
            parameter.grad = averaged if averaged.is_sparse else averaged.to_sparse(gradient.sparse_dim())
        elif averaged.data_ptr() != gradient.data_ptr():
            gradient.copy_(averaged)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this context `step` does not wait for gradients, because `synchronize` was called before."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        self.backward_passes_per_step = passes
        self._passes_left = dict.fromkeys(self._parameter_names, passes)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after"
                    " optimizer.synchronize(). This can cause training slowdown. You may want to consider using"
                    " optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step(closure)  # type: ignore[misc]

    def zero_grad(self, set_to_none: bool = True) -> None:
        if any(self._started.values()) or self._started_groups:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or"
                " optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._started.clear()
        self._started_groups.clear()
        self._ready = 0
        self._synchronized, self._should_synchronize = False, True
        self._passes_left = dict.fromkeys(self._parameter_names, self.backward_passes_per_step)
        super().load_state_dict(state_dict)  # type: ignore[misc]


def DistributedOptimizer(  # the name is Horovod's
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp | int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns an optimizer of the same class, with the same parameter groups and state, that averages gradients over
    the ranks before each step. docs/horovod.md describes the arguments."""
    op = ReduceOp(op)
    if gradient_predivide_factor != 1.0:
        if rocm_built():
            raise ValueError("gradient_predivide_factor not supported yet with ROCm")
        if op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
            DeprecationWarning,
            stacklevel=2,
        )
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if op == Adasum and size() > 1:
        if process_set.process_set_id != global_process_set.process_set_id:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        adasum = _with_methods(optimizer, AdasumMethods)
        adasum.start_distributing(named_parameters, compression, backward_passes_per_step)
        return adasum
    distributed = _with_methods(optimizer, DistributedMethods)
    distributed.start_distributing(
        *(named_parameters, compression, backward_passes_per_step, op, gradient_predivide_factor),
        *(groups, sparse_as_dense, process_set),
    )
    return distributed


def _with_methods(optimizer: torch.optim.Optimizer, methods: type) -> Any:
    """Returns an object with the optimizer's state and parameter groups, of a subclass of its class that has these
    methods first."""
    own = type(optimizer)
    distributed: Any = object.__new__(type(own.__name__, (methods, own), {"__module__": __name__}))
    distributed.__dict__.update(optimizer.__dict__)
    # A learning-rate schedule of the given optimizer has replaced its method `step`, which would skip ours.
    distributed.__dict__.pop("step", None)
    return distributed
