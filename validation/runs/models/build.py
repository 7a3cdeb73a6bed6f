"""Builds the model, the loss and a batch of a case on the current device: `with torch.device("meta"):
make_model(case.model)`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.user.call import Call, bind, build
from validation.runs.case import Sample


def make_model(call: Call) -> nn.Module:
    model: nn.Module = build(call, role="a published model")
    return model


def make_loss(call: Call) -> Callable[[Any, Any], Tensor]:
    return bind(call, role="a published loss")


def make_batch(sample: Sample, samples: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets that consist of zeros. The target of a box is a class and four coordinates."""
    return _inputs(sample, samples), _targets(sample, samples)


def _inputs(sample: Sample, samples: int) -> Tensor:
    if sample.kind in ("tokens", "words", "spans"):
        return torch.zeros(samples, *sample.size, dtype=torch.long)
    return torch.zeros(samples, 3, *sample.size)


def _targets(sample: Sample, samples: int) -> Tensor:
    if sample.kind == "boxes":
        return torch.zeros(samples, 5, sample.targets)
    shapes: dict[str, tuple[int, ...]] = {
        "tokens": sample.size,
        "words": (sample.targets,),
        "spans": (2,),
        "images": (),
        "masks": sample.size,
    }
    return torch.zeros(samples, *shapes[sample.kind], dtype=torch.long)
