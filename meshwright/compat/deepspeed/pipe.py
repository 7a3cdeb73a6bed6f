"""`deepspeed.pipe`: models that are lists of layers, which a pipeline of ranks divides."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.compat.deepspeed.errors import CallError


class LayerSpec:
    """A layer that is made later: a class or function, and its arguments."""

    def __init__(self, typename: Callable[..., Any], *module_args: Any, **module_kwargs: Any) -> None:
        if not callable(typename):
            raise CallError(f"LayerSpec takes a class or a function, not {typename!r:.60}")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log: bool = False) -> Any:
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that is made once for all specs with the same `key`. `forward_fn` is called with the layer and its input,
    in place of the layer."""

    def __init__(
        self,
        key: str,
        typename: Callable[..., Any],
        *module_args: Any,
        forward_fn: Callable[..., Any] | None = None,
        tied_weight_attr: Any = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn, self.tied_weight_attr = key, forward_fn, tied_weight_attr


class PipelineModule(nn.Module):
    """A model that calls its layers one after the other. `layers` are modules, functions and specs.

    `num_stages` ranks hold consecutive layers; `partition_method` is `parameters`, `uniform`, or `type:REGEX`, which
    balances the layers whose class matches. With `activation_checkpoint_interval` above 0, layers with several modules
    compute their activations again in the backward pass (`memory.recompute: full`).
    """

    def __init__(
        self,
        layers: Any,
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Any = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Any = None,
        checkpointable_layers: Any = None,
        dynamic_shape: bool = False,
    ) -> None:
        super().__init__()
        if checkpointable_layers is not None or seed_fn is not None:
            raise CallError("PipelineModule(checkpointable_layers=…, seed_fn=…) is not offered: leave it out")
        if num_stages is None:
            num_stages = topology.get_dim("pipe") if topology is not None else 1
        if num_stages < 1:
            raise CallError(f"PipelineModule(num_stages={num_stages}): give a number of at least 1")
        self.num_stages, self.loss_fn, self.partition_method = num_stages, loss_fn, partition_method
        self.recomputes = activation_checkpoint_interval > 0
        self.tied_modules = nn.ModuleDict()
        self.forward_funcs: list[Callable[..., Any]] = []
        self._names: list[str] = []  # of the modules by which stages can be cut
        for number, spec in enumerate(_layers(layers)):
            if seed_layers:
                torch.manual_seed(base_seed + number)
            self._add(number, spec)

    def _add(self, number: int, spec: Any) -> None:
        if isinstance(spec, TiedLayerSpec):
            if spec.key not in self.tied_modules:
                self.tied_modules[spec.key] = spec.build()
            layer = self.tied_modules[spec.key]
            self.forward_funcs.append(partial(spec.forward_fn, layer) if spec.forward_fn else layer)
            self._names.append(f"tied_modules.{spec.key}")
            return
        layer = spec.build() if isinstance(spec, LayerSpec) else spec
        if not isinstance(layer, nn.Module):
            layer = _Function(layer)
        self.add_module(str(number), layer)
        self.forward_funcs.append(layer)
        self._names.append(str(number))

    def forward(self, inputs: Any) -> Any:
        for layer in self.forward_funcs:
            inputs = layer(inputs)
        return inputs

    def cuts(self) -> tuple[str, ...]:
        """The names of the layers after which a new stage begins."""
        costs = self._costs()
        if len(costs) < self.num_stages:
            raise CallError(f"PipelineModule: {len(costs)} layers cannot be divided into {self.num_stages} stages")
        return tuple(self._names[bound - 1] for bound in balanced_bounds(costs, self.num_stages))

    def _costs(self) -> list[float]:
        method = self.partition_method.lower()
        modules = [self.get_submodule(name) for name in self._names]
        if method == "uniform":
            return [1.0] * len(modules)
        if method == "parameters":
            return [float(sum(parameter.numel() for parameter in module.parameters())) for module in modules]
        if method.startswith("type:"):
            pattern = re.compile(self.partition_method.split(":", 1)[1], re.IGNORECASE)
            costs = [float(bool(pattern.search(type(module).__name__))) for module in modules]
            if not any(costs):
                raise CallError(
                    f"PipelineModule(partition_method={self.partition_method!r}): no layer has such a class"
                )
            return costs
        raise CallError(
            f"PipelineModule(partition_method={self.partition_method!r}) is not offered: write parameters, uniform or"
            " type:REGEX"
        )


class _Function(nn.Module):
    """A layer that is a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, inputs: Any) -> Any:
        return self._function(inputs)


def balanced_bounds(costs: Sequence[float], parts: int) -> list[int]:
    """Returns where all parts but the first begin, so that the largest sum of costs of a part is the smallest possible.
    No part is empty."""
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[n] is (largest sum, bounds) of the first n layers in as many parts as there were rounds.
    best: dict[int, tuple[float, list[int]]] = {count: (total[count], []) for count in range(1, len(costs) + 1)}
    for _ in range(parts - 1):
        previous, best = best, {}
        for count in range(2, len(costs) + 1):
            choices = [
                (max(previous[begin][0], total[count] - total[begin]), [*previous[begin][1], begin])
                for begin in range(1, count)
                if begin in previous
            ]
            if choices:
                best[count] = min(choices)
    return best[len(costs)][1]


def _layers(layers: Any) -> list[Any]:
    if isinstance(layers, nn.Sequential | nn.ModuleList):
        return list(layers)
    if isinstance(layers, nn.Module) or callable(layers):
        raise CallError("PipelineModule takes a list of layers, or an nn.Sequential")
    return list(layers)


class ProcessTopology:
    """The sizes of axes of ranks by name, as scripts give them to `PipelineModule`."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)

    def get_dim(self, axis: str) -> int:
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def world_size(self) -> int:
        size = 1
        for dim in self.dims:
            size *= dim
        return size


class PipeDataParallelTopology(ProcessTopology):
    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        if num_mp > 1:
            raise CallError(f"num_mp is {num_mp}: write tensor_parallel.autotp_size in the configuration, and 1 here")
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])
