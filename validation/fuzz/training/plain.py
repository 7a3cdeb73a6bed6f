"""Trains a case in plain PyTorch in this process: the result that every plan has to have."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from validation.fuzz.losses import LOSSES
from validation.fuzz.program import Case
from validation.fuzz.render import import_source, render
from validation.fuzz.training.data import Batch, batches
from validation.fuzz.training.optimizers import OPTIMIZERS


class Invalid(Exception):
    """The case does not run in plain PyTorch, or its values are too large to compare."""


@dataclass(frozen=True)
class Training:
    """The losses by step, and the weights and buffers at the end. `rounding_only`: for each parameter, where its
    gradients were nothing but rounding in a step."""

    losses: tuple[float, ...]
    state: dict[str, Tensor]
    rounding_only: Mapping[str, Tensor] = field(default_factory=dict)


def build(case: Case, file: Path) -> tuple[nn.Module, ModuleType]:
    """The model of a case with its first weights, in fp64, and the module of its source."""
    source = import_source(render(case), file)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        model = source.Model().double()
    return model, source


def train(case: Case, file: Path, noise: float = 0.0) -> Training:
    """Trains the case. With `noise`, the first weights are changed by this part of their values, to see how much the
    case amplifies rounding."""
    try:
        model, source = build(case, file)
        if noise:
            _disturb(model, noise, case.seed)
        return _train(case, model, source)
    except Invalid:
        raise
    except Exception as error:  # whatever a random program raises
        raise Invalid(f"{type(error).__name__}: {error}") from error


def _train(case: Case, model: nn.Module, source: ModuleType) -> Training:
    optimizer = OPTIMIZERS[case.optimizer](model)
    losses, small = [], dict[str, Tensor]()
    for batch in batches(case):
        optimizer.zero_grad(set_to_none=True)
        losses.append(_backward(case, model, source, batch))
        for name, places in _rounding_only(model).items():
            small[name] = small[name] | places if name in small else places
        if case.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
        optimizer.step()
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for name, value in {**state, "loss": torch.tensor(losses)}.items():
        if not torch.isfinite(torch.view_as_real(value) if value.is_complex() else value).all():
            raise Invalid(f"{name} is not finite")
        if value.numel() and value.abs().max() > 1e6:
            raise Invalid(f"{name} is too large")
    return Training(tuple(losses), state, small)


def _backward(case: Case, model: nn.Module, source: ModuleType, batch: Batch) -> float:
    """Runs forward and backward passes of one batch, and returns its loss."""
    passes = halves(batch) if case.door == "two passes" else [batch]
    total = 0.0
    for inputs, target in passes:
        loss = loss_of(case, source, model(inputs, target) if LOSSES[case.loss].is_own else model(inputs), target)
        if not loss.requires_grad:
            raise Invalid("the loss has no gradient")
        (loss / len(passes)).backward()
        total += loss.item() / len(passes)
    return total


def loss_of(case: Case, source: ModuleType, output: Any, target: Tensor) -> Tensor:
    """The loss of a model's output as one number."""
    value = output if LOSSES[case.loss].is_own else source.loss(output, target)
    return value[0] / value[1] if isinstance(value, tuple) else value


def halves(batch: Batch) -> list[Batch]:
    """The two parts of a batch for loops with two backward passes in a step."""
    middle = len(batch[0]) // 2
    return [(batch[0][:middle], batch[1][:middle]), (batch[0][middle:], batch[1][middle:])]


def _rounding_only(model: nn.Module) -> dict[str, Tensor]:
    """For each parameter, where its gradient is zero but for rounding, such as in the bias of the keys of attention. An
    exact zero counts only if the others of the parameter are rounding, too."""
    sizes = {n: p.grad.abs() for n, p in model.named_parameters() if p.grad is not None and p.numel()}
    largest = max((size.max().item() for size in sizes.values()), default=0.0)
    if largest < 1e-9:
        raise Invalid("all gradients are zero")
    limit = 1e-10 * largest
    return {
        name: (size < limit) & ((size > 0) | (0 < size.max() < limit))
        for name, size in sizes.items()
        if bool(((size > 0) & (size < limit)).any())
    }


def _disturb(model: nn.Module, noise: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for value in model.parameters():
            factors = torch.rand(value.shape, generator=generator, dtype=torch.float64) * 2 - 1
            value.mul_(1 + noise * factors)
