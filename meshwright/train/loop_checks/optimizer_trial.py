"""Tries out whether an optimizer may update the part of a weight that a rank holds: it has to change the part as it
would change the same elements of the whole. Adafactor, LAMB, LARS, Muon or Shampoo do not, because their changes follow
from norms, means or products of the whole tensor.

The optimizer's class and options update small random tensors, once whole and once in parts:

    part(update(whole, gradient)) = update(part(whole), part(gradient))                       _check_halves()
    update(sharded DTensor)       = update(whole)                                             _check_shards()

An optimizer that is known (`is_elementwise`) is not tried. One that fails also on whole tensors of each kind that is
tried, or that draws random numbers, cannot be tried: it is used with a warning, since the check of a plan before
training still compares what it does.
"""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meshwright.errors import InputError
from meshwright.parallel.weights.layout import ParameterLayout, WholeOnOneRank, shard_layout
from meshwright.plan import Plan
from meshwright.profile.optimizer import is_elementwise
from meshwright.user.code import first_line

# Sizes of dimensions, and steps: small tensors with many steps, and tensors above thresholds that optimizers have.
_TRIALS = ((12, 12), (256, 3))
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}  # of the largest change
_FP32_LR = 0.05  # a smaller one would leave too few digits of the change


class _CannotTry(Exception):
    """The optimizer does not update plain tensors like those of the trial."""


@dataclass(frozen=True)
class _Trial:
    """How an optimizer is tried: on tensors of this dtype and device, with the options of one of its groups."""

    optimizer: torch.optim.Optimizer
    group: Mapping[str, Any]
    dtype: torch.dtype
    device: torch.device

    def make(self, parameter: Tensor) -> torch.optim.Optimizer:
        """Returns an optimizer of the same class and options for one parameter."""
        options = {name: copy.deepcopy(value) for name, value in self.group.items() if name != "params"}
        if isinstance(options.get("lr"), float | int):
            options["lr"] = max(options["lr"], _FP32_LR) if self.dtype == torch.float32 else options["lr"] or _FP32_LR
        kind = type(self.optimizer)
        accepted = inspect.signature(kind).parameters
        defaults = {name: value for name, value in self.optimizer.defaults.items() if name in accepted}
        return kind([{**options, "params": [parameter]}], **copy.deepcopy(defaults))

    def change(self, parts: Sequence[Tensor], gradients: Iterable[Sequence[Tensor]], seed: int) -> list[Tensor]:
        """Updates each part by an optimizer of its own, once per item of `gradients`. Returns the parts after it."""
        parameters = [nn.Parameter(part.clone()) for part in parts]
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.default_generator.manual_seed(seed)
            if self.device.type == "cuda":
                torch.cuda.manual_seed(seed)
            optimizers = [self.make(parameter) for parameter in parameters]
            for of_step in gradients:
                for parameter, optimizer, gradient in zip(parameters, optimizers, of_step, strict=True):
                    parameter.grad = gradient.clone()
                    optimizer.step()
        return [parameter.detach() for parameter in parameters]


def check_optimizer_on_parts(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, Tensor],
    layouts: Mapping[str, ParameterLayout],
) -> None:
    """Raises an `InputError` if a rank holds parts of weights and the optimizer looks at whole tensors. `parameters`
    are those of this rank, by name. The ranks that share a sharded weight call this together."""
    if is_elementwise(optimizer):
        return
    names = {id(parameter): name for name, parameter in parameters.items()}
    tried: set[Any] = set()
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = names[id(parameter)]
            layout = layouts.get(name)
            is_split = layout is not None and not isinstance(layout, WholeOnOneRank)
            key = (number, is_split, parameter.dim(), layout.dim if layout and is_split else None)
            if parameter.dim() == 0 or key in tried or not (is_split or isinstance(parameter, DTensor)):
                continue
            tried.add(key)
            try:
                if layout is not None and is_split:
                    _check_halves(optimizer, group, parameter, name, layout)
                else:
                    _check_shards(optimizer, group, parameter, name)
            except _CannotTry as error:
                warnings.warn(
                    f"{type(optimizer).__name__} updates {name}, of which a rank holds a part, but whether it may could"
                    f" not be tried on small tensors: {error}",
                    stacklevel=2,
                )
                return


def checker_of_optimizer(optimizer: torch.optim.Optimizer | None) -> Callable[[Plan], None]:
    """Returns a function that raises an `InputError` for a plan that splits weights, or stacked experts, which the
    optimizer has to see whole. It is for searches: which weights a plan splits along which dimension is not known, so
    that the first two dimensions of every weight are tried."""

    @cache
    def problem() -> str | None:
        tried: set[tuple[int, int]] = set()
        assert optimizer is not None
        for number, group in enumerate(optimizer.param_groups):
            for weight in group["params"]:
                if weight.dim() < 2 or (number, weight.dim()) in tried:
                    continue
                tried.add((number, weight.dim()))
                layouts = [shard_layout(weight.shape, dim, (), "tensor", 2, 0) for dim in (0, 1)]
                try:
                    for layout in layouts:
                        _check_halves(optimizer, group, weight, "a weight", layout)
                except _CannotTry:
                    return None
                except InputError as error:
                    return str(error)
        return None

    def check(plan: Plan) -> None:
        splits = plan.axes.tensor > 1 or plan.axes.expert > 1
        if splits and optimizer is not None and not is_elementwise(optimizer) and (text := problem()):
            raise InputError(text)

    return check


def _check_halves(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: Tensor, name: str, layout: ParameterLayout
) -> None:
    """Compares the update of whole tensors with that of their halves."""
    for limit, steps in _TRIALS:
        shape = _trial_shape(layout.shape, layout.dim, 2, limit)
        trial, start, gradients, expected = _whole(optimizer, group, parameter, shape, steps)

        def halves(whole: Tensor) -> list[Tensor]:
            return list(whole.chunk(2, layout.dim))

        parts = trial.change(halves(start), [halves(gradient) for gradient in gradients], seed=0)
        if not _is_close(torch.cat(parts, layout.dim), expected, start, _TOLERANCES[trial.dtype]):
            sizes = " × ".join(map(str, layout.shape))
            raise InputError(
                f"optimizer: {type(optimizer).__name__} looks at whole tensors, but axes.{layout.axis} of the plan"
                f" divides {name} ({sizes}) along dimension {layout.dim}, and each rank would update its part"
                " differently: use an optimizer that updates each element by itself, such as AdamW, or a plan without"
                f" axes.{layout.axis}"
            )


def _check_shards(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: DTensor, name: str) -> None:
    """Compares the update of whole tensors with that of DTensors that are divided as the parameter is."""
    mesh, placements = parameter.device_mesh, parameter.placements
    rows = next((placement.dim for placement in placements if isinstance(placement, Shard)), 0)
    shape = _trial_shape(tuple(parameter.shape), rows, mesh.size(), _TRIALS[0][0])
    trial, start, gradients, expected = _whole(optimizer, group, parameter, shape, steps=3)

    def shards(whole: Tensor) -> list[Tensor]:
        return [distribute_tensor(whole.to(mesh.device_type), mesh, placements)]

    problem = (
        f"optimizer: {type(optimizer).__name__} looks at whole tensors, but axes.shard of the plan divides {name}: use"
        " an optimizer that updates each element by itself, such as AdamW, or a plan with axes.replicate instead"
    )
    try:
        (part,) = trial.change(shards(start), [shards(gradient) for gradient in gradients], seed=0)
        whole = part.full_tensor() if isinstance(part, DTensor) else part
    except Exception as error:  # whatever the optimizer's own code raises on tensors that are divided
        raise InputError(f"{problem} ({type(error).__name__}: {first_line(error)})") from error
    if not _is_close(whole.to(start.device), expected, start, _TOLERANCES[trial.dtype]):
        raise InputError(problem)


def _whole(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: Tensor, shape: tuple[int, ...], steps: int
) -> tuple[_Trial, Tensor, list[Tensor], Tensor]:
    """Returns a trial, a random tensor, its gradients in each step, and the tensor after them. Tensors are on the host
    and precise if the optimizer updates such; else like the parameter."""
    host, problem = torch.device("cpu"), ""
    own = host if parameter.is_meta else parameter.device
    for dtype, device in ((torch.float64, host), (torch.float32, host), (torch.float32, own)):
        trial = _Trial(optimizer, group, dtype, device)
        generator = torch.Generator().manual_seed(0)
        start, *gradients = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(1 + steps))
        try:
            results = [trial.change([start], [[gradient] for gradient in gradients], seed)[0] for seed in (0, 1)]
        except Exception as error:  # whatever the optimizer's own code raises
            problem = problem or f"{type(error).__name__}: {first_line(error)}"
            continue
        if not torch.equal(results[0], results[1]):
            raise _CannotTry("it draws random numbers")
        if torch.equal(results[0], start):
            raise _CannotTry("it does not change them")
        return trial, start, gradients, results[0]
    raise _CannotTry(problem)


def _trial_shape(shape: Sequence[int], dim: int, parts: int, limit: int) -> tuple[int, ...]:
    """A shape of a trial for a weight of this shape. Only two dimensions are as large as the limit; the dimension that
    is divided is a multiple of the parts."""
    largest = sorted(range(len(shape)), key=lambda d: -shape[d])[:2]
    sizes = [min(size, limit if d in largest else 4) for d, size in enumerate(shape)]
    sizes[dim] = max(sizes[dim] // parts, 1) * parts
    return tuple(sizes)


def _is_close(changed: Tensor, expected: Tensor, start: Tensor, tolerance: float) -> bool:
    """Whether two changes of a tensor are the same, in proportion to the largest change of an element."""
    return bool((changed - expected).abs().max() <= tolerance * (expected - start).abs().max())
