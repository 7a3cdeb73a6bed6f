"""`simulate`: the weights that a recorded optimizer should have made of recorded gradients."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.audit.recorded_run import RecordedRun

_OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop")
# How a step is computed, and not what.
_WITHOUT_EFFECT = ("foreach", "fused", "capturable", "differentiable", "initial_lr", "decoupled_weight_decay")


@dataclass(frozen=True)
class Options:
    """The optimizer of a parameter: its class and the options of its group."""

    optimizer: str
    values: dict[str, Any]


def options_of(run: RecordedRun) -> dict[str, Options]:
    """The options of each parameter when its optimizer first stepped, by the reference's name."""
    names = {
        (rank.rank, own_name): entry.get("reference_name") or own_name
        for rank in run.ranks
        for own_name, entry in rank.header["parameters"].items()
    }
    options: dict[str, Options] = {}
    for event in run.events("options"):
        values = {key: _plain(value) for key, value in event["values"].items() if key not in _WITHOUT_EFFECT}
        for name in event["names"]:
            options.setdefault(names.get((event.rank, name), name), Options(event["optimizer"], values))
    return options


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def simulate(run: RecordedRun, name: str, options: Options, steps: range, kind: str = "gradient") -> Tensor | None:
    """The weight after the steps, from that before the first of them, with an empty state (of a large one, the elements
    that are recorded as they are). None if the optimizer is not
    one of torch, or something was not recorded."""
    before = run.whole_plain(steps[0] - 1, "weight" if steps[0] > 1 else "start", name)
    kinds = [kind if run.tensors(step, kind).parts else "gradient" for step in steps]
    gradients = [run.whole_plain(step, of_step, name) for step, of_step in zip(steps, kinds, strict=True)]
    if options.optimizer not in _OPTIMIZERS or before is None or any(gradient is None for gradient in gradients):
        return None
    weight = before.to(torch.float64).clone().requires_grad_()
    optimizer_class = getattr(torch.optim, options.optimizer)
    known = inspect.signature(optimizer_class).parameters
    optimizer = optimizer_class([weight], **{key: value for key, value in options.values.items() if key in known})
    for gradient in gradients:
        assert gradient is not None
        weight.grad = gradient.to(torch.float64)
        optimizer.step()
    return weight.detach()


def explains(predicted: Tensor | None, own: Tensor, right: Tensor) -> bool:
    """Whether a prediction leaves less than a tenth of the difference between both sides' weights."""
    if predicted is None or predicted.shape != own.shape:
        return False
    left = float((predicted - own.double()).norm())
    rounding = 2.0**-22 * float(own.double().norm())
    return left <= 0.1 * float((own.double() - right.double()).norm()) + rounding
