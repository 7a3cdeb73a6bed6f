"""A metric's value is that of the whole evaluation set, however it is divided into batches and ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshwright.errors import InputError
from meshwright.train.metrics import MetricTotals, accuracy, mean_error, top_k

CPU = torch.device("cpu")
GENERATOR = torch.Generator().manual_seed(0)
OUTPUT = torch.randn(40, 4, generator=GENERATOR, dtype=torch.float64)
TARGET = torch.randint(0, 4, (40,), generator=GENERATOR)


def batch_mean(output: Tensor, target: Tensor) -> Tensor:
    """A plain number: the mean over the batch's samples."""
    return output.gather(1, target[:, None]).mean()


class Recall:
    """Returns a tensor and has `finish`, because the mean over classes is not a mean of batch means."""

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        matrix = torch.zeros(4, 4)
        for guess, truth in zip(output.argmax(1), target, strict=True):
            matrix[truth, guess] += 1
        return matrix

    def finish(self, total: Tensor) -> float:
        return float((total.diag() / total.sum(1).clamp(min=1)).mean())


METRICS: dict[str, Callable[[Any, Any], Any]] = {
    "pair": accuracy,
    "number": batch_mean,
    "tensor": Recall(),
}


def whole() -> dict[str, float]:
    return {
        "pair": float((OUTPUT.argmax(1) == TARGET).double().mean()),
        "number": float(batch_mean(OUTPUT, TARGET)),
        "tensor": Recall().finish(Recall()(OUTPUT, TARGET).double()),
    }


@given(
    st.lists(st.integers(0, 39), max_size=12, unique=True).map(sorted),
    st.lists(st.integers(0, 3), min_size=13, max_size=13),
)
def test_batches_and_ranks_do_not_change_the_value(cuts: list[int], owners: list[int]) -> None:
    bounds = [0, *[cut for cut in cuts if cut], 40]
    tallies = [MetricTotals(METRICS, CPU) for _ in range(4)]
    for begin, end, owner in zip(bounds[:-1], bounds[1:], owners, strict=False):
        tallies[owner].add(OUTPUT[begin:end], TARGET[begin:end], end - begin)
    totals: dict[str, Tensor] = {}
    for tally in tallies:
        for name, total in tally.totals().items():
            totals[name] = totals[name] + total if name in totals else total
    assert tallies[0].finish(totals) == pytest.approx(whole(), rel=1e-12)


def test_ready_metrics() -> None:
    output, target = torch.tensor([[0.1, 0.9, 0.5], [0.8, 0.1, 0.2]]), torch.tensor([2, 0])
    assert [int(part) for part in accuracy(output, target)] == [1, 2]
    assert [int(part) for part in top_k(output, target, k=2)] == [2, 2]
    assert [int(part) for part in partial(top_k, k=1)(output, target)] == [1, 2]
    total, count = mean_error(torch.tensor([1.0, 5.0]), torch.tensor([2.0, 2.0]))
    assert float(total) / count == 2.0


def test_a_metric_that_returns_something_else_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="metric 'odd' returned Tensor: return a number, a pair"):
        MetricTotals({"odd": lambda output, target: output}, CPU).add(OUTPUT, TARGET, 40)


def test_labels_of_skipped_pictures_are_not_counted() -> None:
    scores = torch.tensor([[0.1, 0.9, 0.0], [0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.6, 0.3, 0.1]])
    truth = torch.tensor([1, 1, -100, 2])
    assert [int(part) for part in accuracy(scores, truth)] == [1, 3]
    assert [int(part) for part in top_k(scores, truth, k=2)] == [2, 3]
    assert [int(part) for part in top_k(scores, truth, k=5)] == [3, 3]  # there are but three classes


@pytest.mark.parametrize("metric", [accuracy, top_k, mean_error])
def test_outputs_that_are_no_tensor_are_refused_with_what_to_do(metric: Callable[[Any, Any], Any]) -> None:
    words = rf"^the metric {metric.__name__} takes a tensor, but the model returns a dict: name a metric of your own"
    with pytest.raises(InputError, match=words):
        metric({"logits": OUTPUT}, TARGET)
