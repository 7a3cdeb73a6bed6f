"""Finds the mixtures of experts of a model, and makes them traceable: on fake tensors, which have no values, every
expert gets the number of rows that even routing gives it.

Experts are found in two forms:

- stacked: a module whose own weights all have one row per expert, and that is called with the rows, the numbers of the
  experts of each row (integers) and their weights. Mixtures of the transformers library and of
  `workloads/text/experts.py` have this form.
- list: equal modules in a list (or dict) that has `expert` in its name, each called on the rows that are routed to it
  by the module that holds the list.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_GROUPED = "grouped_mm"  # the form of transformers' mixtures whose operators do not depend on the routing


@dataclass(frozen=True)
class ExpertLayer:
    """One mixture of experts. `module` is the name of the module with the stacked weights, or of the module that holds
    the list. `experts` is their number. `weights` are the names of the stacked parameters, or of the expert modules of
    a list in their order."""

    kind: Literal["stacked", "list"]
    module: str
    experts: int
    weights: tuple[str, ...]


@dataclass(frozen=True)
class RoutedExperts:
    """The `number` experts of one mixture. `module` is the module that has or holds them, `modules` those that compute
    with their weights, and `parameters` are the names of the weights. `is_list`: each expert is a module of its own."""

    module: str
    number: int
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    is_list: bool


def find_expert_layers(model: nn.Module) -> tuple[ExpertLayer, ...]:
    """Returns the mixtures of experts of a model in the order of its modules. The model may be on the meta device."""
    layers: list[ExpertLayer] = []
    for name, module in model.named_modules():
        if _is_stacked(module):
            weights = tuple(join(name, own) for own, _ in module.named_parameters(recurse=False))
            layers.append(ExpertLayer("stacked", name, next(module.parameters(recurse=False)).shape[0], weights))
        for child_name, child in module.named_children():
            if "expert" in child_name.lower() and (experts := _equal_modules(child)):
                names = tuple(join(name, child_name, key) for key in experts)
                layers.append(ExpertLayer("list", name, len(names), names))
    return tuple(layers)


def balances_experts(model: nn.Module) -> bool:
    """Whether the model adds a load-balancing loss of its routers to its own loss, by its configuration: a field that
    the mixtures of the transformers library have."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    return any(getattr(config, "output_router_logits", False) is True for config in configs)


def parameter_names(model: nn.Module, layer: ExpertLayer) -> tuple[str, ...]:
    """The names of all parameters of the layer's experts."""
    if layer.kind == "stacked":
        return layer.weights
    return tuple(join(name, own) for name in layer.weights for own, _ in model.get_submodule(name).named_parameters())


def routed_experts(model: nn.Module) -> tuple[RoutedExperts, ...]:
    """The mixtures of a model, for its profile."""
    return tuple(
        RoutedExperts(
            layer.module,
            layer.experts,
            (layer.module,) if layer.kind == "stacked" else layer.weights,
            parameter_names(model, layer),
            layer.kind == "list",
        )
        for layer in find_expert_layers(model)
    )


def join(*names: str) -> str:
    """The names of nested modules, joined by dots; the model itself has the empty name."""
    return ".".join(name for name in names if name)


def _is_stacked(module: nn.Module) -> bool:
    own = list(module.parameters(recurse=False))
    experts = getattr(module, "num_experts", None)
    if (
        not own
        or not isinstance(experts, int)
        or experts < 2
        or any(True for c in module.children() if _has_weights(c))
    ):
        return False
    return (
        any(parameter.dim() == 3 for parameter in own)
        and all(parameter.dim() > 1 and parameter.shape[0] == experts for parameter in own)
        and len(_required_arguments(type(module).forward)) == 4  # with `self`
    )


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]


def _equal_modules(module: nn.Module) -> Mapping[str, nn.Module] | None:
    """The modules of a list or dict by their keys, if they are two or more of one type whose weights have equal
    shapes; otherwise None."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return None
    children = dict(module.named_children())
    kinds = {(type(child), tuple((n, p.shape) for n, p in child.named_parameters())) for child in children.values()}
    return children if len(children) > 1 and len(kinds) == 1 and next(iter(kinds))[1] else None


# ---- tracing


def route_evenly(fake: nn.Module, batch: int) -> None:
    """Makes the mixtures of a fake copy of a model traceable, in place. `batch` is the number of samples of the batch
    that is traced. Stacked experts of the transformers library run their grouped product. In other modules with stacked
    experts, and in the module that holds a list of experts, each expert gets as many rows as even routing gives it, in
    proportion to the batch."""
    for layer in find_expert_layers(fake):
        module = fake.get_submodule(layer.module)
        config: Any = getattr(module, "config", None) if layer.kind == "stacked" else None
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = _GROUPED
        else:
            module.forward = _EvenForward(module.forward, layer.experts, batch)


class _EvenForward:
    """Replaces the forward function of the module that holds a list of experts."""

    def __init__(self, forward: Callable[..., Any], experts: int, batch: int) -> None:
        self._forward = forward
        self._experts = experts
        self._batch = batch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _EvenRouting(self._experts, self._batch):
            return self._forward(*args, **kwargs)


class _EvenRouting(TorchFunctionMode):
    """Within this mode, functions that return the positions of true elements of a mask return as many positions as
    even routing gives. Each such call is taken for the next expert's; the number of all routed rows is that of the
    indices which the last `topk`, `max` or `argmax` returned. A mask that is computed from sums over rows says which
    experts are used: all are, and code may loop over their numbers."""

    def __init__(self, experts: int, batch: int) -> None:
        super().__init__()
        self._experts = experts
        self._batch = batch
        self._routed_rows = 0
        self._counts: list[Tensor] = []  # sums, and what is computed from them
        self._used: list[Tensor] = []  # the numbers of all experts
        self._numbers: list[tuple[Tensor, int]] = []  # tensors that are the number of one expert
        self._calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "nonzero":
            as_tuple = kwargs.get("as_tuple", args[1] if len(args) > 1 else False)
            positions = self._positions(args[0])
            return positions if as_tuple else self._known(torch.stack(positions, -1), args[0])
        if name == "where" and len(args) == 1 and not kwargs:
            return self._positions(args[0])
        if name == "__getitem__" and isinstance(args[1], Tensor) and args[1].dtype is torch.bool:
            return func(args[0], self._positions(args[1]), **kwargs)
        if name == "unbind" and any(args[0] is used for used in self._used):  # how torch iterates over a tensor
            return tuple(self._number(element, number) for number, element in enumerate(func(*args, **kwargs)))
        number = next((value for tensor, value in self._numbers if args and tensor is args[0]), None)
        if number is not None and name in ("item", "__index__", "__int__"):
            return number
        if number is not None and name in ("__eq__", "eq") and isinstance(args[1], int):
            return number == args[1]
        result = func(*args, **kwargs)
        if name in ("topk", "max", "argmax"):
            indices = result if isinstance(result, Tensor) else result[1]
            self._routed_rows = indices.numel() if not indices.is_floating_point() else self._routed_rows
        if isinstance(result, Tensor):
            if name in ("sum", "any", "bincount") or any(args[0] is count for count in self._counts if args):
                self._counts.append(result)
            if number is not None and result.numel() == 1:
                self._number(result, number)
        return result

    def _number(self, tensor: Tensor, value: int) -> Tensor:
        self._numbers.append((tensor, value))
        return tensor

    def _known(self, positions: Tensor, mask: Tensor) -> Tensor:
        if self._says_which_are_used(mask):
            self._used.append(positions)
        return positions

    def _says_which_are_used(self, mask: Tensor) -> bool:
        return mask.numel() == self._experts and any(mask is count for count in self._counts)

    def _positions(self, mask: Tensor) -> tuple[Tensor, ...]:
        used = self._says_which_are_used(mask)
        rows = self._experts if used else self._rows_of_next_expert(self._routed_rows or mask.numel())
        positions = tuple(torch.zeros(rows, dtype=torch.int64, device=mask.device) for _ in mask.shape)
        if used and len(positions) == 1:
            self._used.append(positions[0])
        return positions

    def _rows_of_next_expert(self, routed_rows: int) -> int:
        """The rows of all experts together are `routed_rows`, and those of each are a multiple of the batch."""
        number, self._calls = self._calls % self._experts, self._calls + 1
        per_sample, rest = divmod(routed_rows // self._batch, self._experts)
        return self._batch * (per_sample + (number < rest))


def routed_note(layers: Sequence[ExpertLayer]) -> str | None:
    """A phrase for users about how rows that are routed to experts were counted; None for a model without experts."""
    if not layers:
        return None
    numbers = sorted({layer.experts for layer in layers})
    experts = " or ".join(map(str, numbers))
    return f"with rows routed evenly to the {experts} experts of {len(layers)} layers"
