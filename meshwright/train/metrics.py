"""What an evaluation measures, and how the ranks' parts become one number.

A metric is called as `metric(output, target)` for every evaluated batch and returns one of

- a pair (sum, count): the value is the sum of sums over the sum of counts;
- a number: the batch's mean over its samples, averaged with the batch's samples as weight;
- a tensor, where the metric also has `finish(total) -> float`: the tensors of all batches are added up and
  `finish` turns the total into the value (a confusion matrix into mean IoU, say).

One that compares samples with each other has a method `joined(across)`, as a loss may (loss.py).

Everything is added in fp64 over batches and ranks, so the value is that of the whole evaluation set.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from meshwright.errors import InputError

Metric = Callable[[Any, Any], Any]


def accuracy(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The share of targets that the largest output names; a negative one, of a sample that was skipped, is none."""
    return (output.argmax(dim=1) == target).sum(), (target >= 0).sum()


def top_k(output: Tensor, target: Tensor, k: int = 5) -> tuple[Tensor, Tensor]:
    """The share of targets that are among the k largest outputs, of all where there are fewer."""
    named = output.topk(min(k, output.shape[1]), dim=1).indices
    return (named == target.unsqueeze(1)).any(dim=1).sum(), (target >= 0).sum()


def mean_error(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """The mean absolute difference."""
    return (output - target).abs().double().sum(), target.numel()


def without_rows(output: Any) -> Any:
    return tree_map(lambda value: value[:0] if isinstance(value, Tensor) else value, output)


class Tally:
    """The running totals of an evaluation on one rank."""

    def __init__(self, metrics: Mapping[str, Metric], device: torch.device) -> None:
        self._metrics = metrics
        self._device = device
        self._totals: dict[str, Tensor] = {}

    def add(self, output: Any, target: Any, samples: int) -> None:
        """Of a batch without samples only those metrics hear that compare samples of all ranks: the others wait for
        this one."""
        for name, metric in self._metrics.items():
            if samples:
                self.add_value(name, metric(output, target), samples)
            elif hasattr(metric, "joined"):
                self.add_value(name, metric(without_rows(output), target), samples)

    def add_value(self, name: str, value: Any, samples: float | Tensor) -> None:
        if hasattr(self._metrics.get(name), "finish"):
            part = torch.as_tensor(value, device=self._device).double()
        elif isinstance(value, tuple | list) and len(value) == 2:
            part = torch.stack([torch.as_tensor(v, device=self._device).double() for v in value])
        elif isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
            mean = torch.as_tensor(value, device=self._device).double().reshape(())
            weight = torch.as_tensor(samples, device=self._device).double()
            part = torch.stack([mean * weight, weight])
        else:
            raise InputError(
                f"metric '{name}' returned {type(value).__name__}: return a number, a pair (sum, count), "
                "or a tensor together with finish(total)"
            )
        self._totals[name] = self._totals[name] + part if name in self._totals else part

    def totals(self) -> dict[str, Tensor]:
        return self._totals

    def finish(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, total in totals.items():
            finish = getattr(self._metrics.get(name), "finish", None)
            values[name] = float(finish(total)) if finish else float(total[0] / total[1])
        return values
