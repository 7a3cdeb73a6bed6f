"""The metrics of an evaluation: ready ones, and how the values of batches and ranks become one number.

A metric is called as `metric(output, target)` for every evaluated batch and returns one of

- a pair (sum, count): the value is the sum of all sums divided by the sum of all counts;
- a number: the mean over the batch's samples; the value is the average over batches, weighted by their sizes;
- a tensor, if the metric also has a method `finish(total) -> float`: the tensors of all batches are added up, and
  `finish` turns the total into the value (a confusion matrix into mean IoU, for example).

A metric that compares the samples of a batch with each other has a method `joined(across)`, see loss/loss.py.

All sums are taken in fp64 over all batches and ranks. Therefore the value is that of the whole evaluation set.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import InputError
from meshwright.train.torch_private import tree_map

Metric = Callable[[Any, Any], Any]


def accuracy(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of samples whose largest output is at the target class, and the number of samples. A negative
    target marks a sample that was skipped, and is not counted."""
    _check_tensor("accuracy", output)
    return (output.argmax(dim=1) == target).sum(), (target >= 0).sum()


def top_k(output: Tensor, target: Tensor, k: int = 5) -> tuple[Tensor, Tensor]:
    """Returns the number of samples whose target class is among the `k` largest outputs (or all outputs, if there are
    fewer), and the number of samples. Samples with a negative target are not counted."""
    _check_tensor("top_k", output)
    largest = output.topk(min(k, output.shape[1]), dim=1).indices
    return (largest == target.unsqueeze(1)).any(dim=1).sum(), (target >= 0).sum()


def mean_error(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Returns the sum of the absolute errors and the number of elements, whose quotient is the mean absolute error."""
    _check_tensor("mean_error", output)
    return (output - target).abs().double().sum(), target.numel()


def _check_tensor(metric: str, output: Any) -> None:
    if not isinstance(output, Tensor):
        raise InputError(
            f"the metric {metric} takes a tensor, but the model returns a {type(output).__name__}: name a metric of"
            " your own in metrics, which takes the tensor out of it (output.logits for models of transformers)"
        )


def compares_samples(function: Any) -> bool:
    """Whether a loss or metric compares the samples of a global batch with each other, that is, has a method
    `joined`."""
    return hasattr(function, "joined")


def without_rows(output: Any) -> Any:
    """Returns a model's output with each tensor cut to 0 rows (dimension 0), as it would be for a batch without
    samples."""
    return tree_map(lambda value: value[:0] if isinstance(value, Tensor) else value, output)


def evaluated_value(values: Mapping[str, float], name: str, field: str) -> float:
    """Returns the value of a metric of an evaluation. Raises an `InputError` if it is not there, although the job's
    `field` names it: the evaluation of a model that returns its loss in training mode only has no `loss`."""
    if name not in values:
        raise InputError(
            f"{field} is '{name}', but the evaluation has only {', '.join(values)}, because the model returns no loss"
            f" in evaluation mode: name one of metrics in {field}"
        )
    return values[name]


class MetricTotals:
    """Adds up the loss and the metrics of an evaluation on one rank, and computes their values from the totals of all
    ranks."""

    def __init__(self, metrics: Mapping[str, Metric], device: torch.device) -> None:
        self._metrics = metrics
        self._device = device
        self._totals: dict[str, Tensor] = {}

    def add(self, output: Any, target: Any, samples: int) -> None:
        """Adds the metrics of a batch. If `samples` is 0, only metrics that compare samples are called, because they
        communicate, and the other ranks wait for this one."""
        for name, metric in self._metrics.items():
            if samples:
                self.add_value(name, metric(output, target), samples)
            elif compares_samples(metric):
                self.add_value(name, metric(without_rows(output), target), samples)

    def add_value(self, name: str, value: Any, samples: float | Tensor) -> None:
        """Adds `value`, which the metric `name` returned for a batch of `samples` samples."""
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
        """The totals of this rank by the name of the metric: (sum, count) or, for a metric with `finish`, its summed
        tensors."""
        return self._totals

    def finish(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        """Returns the value of each metric by name. `totals` are the `totals()` of all ranks, added up."""
        values: dict[str, float] = {}
        for name, total in totals.items():
            finish = getattr(self._metrics.get(name), "finish", None)
            values[name] = float(finish(total)) if finish else float(total[0] / total[1])
        return values
