from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.errors import InputError
from meshwright.workloads.multitask import Multitask, MultitaskLoss, task_accuracy, task_error, task_order

TASKS: dict[str, dict[str, Any]] = {
    "topic": {"kind": "classification", "classes": 3},
    "mood": {"kind": "regression"},
    "alike": {"kind": "similarity"},
    "fits": {"kind": "ranking"},
}
SIZES: dict[str, Any] = {"layers": 1, "hidden": 16, "heads": 2, "sequence": 6, "vocabulary": 30, "dropout": 0.0}
TARGET = torch.tensor([[0.0, 2.0], [1.0, 0.5], [2.0, -1.0], [3.0, 0.0], [0.0, 1.0]])


def model() -> Multitask:
    torch.manual_seed(0)
    return Multitask(TASKS, **SIZES)


def texts() -> Tensor:
    tokens = torch.randint(1, 30, (5, 3, 6), generator=torch.Generator().manual_seed(1))
    tokens[:, :, 4:] = 0
    return tokens


def test_every_head_has_an_output_for_every_sample() -> None:
    output = model()(texts())
    assert {name: tuple(scores.shape) for name, scores in output.items()} == {
        "topic": (5, 3), "mood": (5,), "alike": (5,), "fits": (5,)
    }  # fmt: skip
    assert list(output) == list(TASKS)
    assert output["alike"].abs().max() <= 1


def test_texts_are_encoded_independently() -> None:
    """A classification depends on the first text only. A ranking of two equal documents is 0, and exchanging the
    documents changes its sign."""
    tokens, net = texts(), model()
    changed = tokens.clone()
    changed[:, 1:] = 0
    assert torch.allclose(net(tokens)["topic"], net(changed)["topic"], atol=1e-6)
    assert torch.allclose(net(tokens[:, [0, 2, 1]])["fits"], -net(tokens)["fits"], atol=1e-6)
    assert torch.allclose(net(tokens[:, [0, 0, 0]])["fits"], torch.zeros(5), atol=1e-6)
    assert torch.allclose(net(tokens[:, [0, 0, 0]])["alike"], torch.ones(5), atol=1e-6)
    assert torch.allclose(net(tokens[:, [1, 0, 2]])["alike"], net(tokens)["alike"], atol=1e-6)


def test_the_loss_of_a_sample_is_that_of_its_task() -> None:
    output = model()(texts())
    expected = [
        F.cross_entropy(output["topic"][0], torch.tensor(2)),
        (output["mood"][1] - 0.5) ** 2,
        (output["alike"][2] + 1) ** 2,
        F.softplus(-output["fits"][3]),
        F.cross_entropy(output["topic"][4], torch.tensor(1)),
    ]
    assert torch.allclose(MultitaskLoss(TASKS)(output, TARGET), torch.stack(expected).mean())
    weighted = MultitaskLoss(TASKS, {"mood": 3.0})(output, TARGET)
    assert torch.allclose(weighted, (torch.stack(expected).sum() + 2 * expected[1]) / 5)


def test_samples_of_other_tasks_give_a_head_no_gradient() -> None:
    net = model()
    MultitaskLoss(TASKS)(net(texts()), TARGET[1:2].expand(5, 2)).backward()
    moved = {name for name, p in net.heads.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert moved == {"mood.inner.weight", "mood.inner.bias", "mood.out.weight", "mood.out.bias"}


def test_a_metric_counts_only_the_samples_of_its_task() -> None:
    output = {
        "topic": torch.tensor([[0.0, 0, 9], [0, 0, 9], [0, 0, 9], [0, 0, 9], [0, 0, 9]]),
        "mood": torch.full((5,), 0.25),
        "alike": torch.full((5,), 0.0),
        "fits": torch.tensor([1.0, 1, 1, -1, 1]),
    }
    assert [float(part) for part in task_accuracy(output, TARGET, "topic")] == [1, 2]
    assert [float(part) for part in task_error(output, TARGET, "mood")] == [0.25, 1]
    assert [float(part) for part in task_error(output, TARGET, "alike")] == [1, 1]
    assert [float(part) for part in task_order(output, TARGET, "fits")] == [0, 1]
    with pytest.raises(InputError, match="no task 'topics': did you mean 'topic'"):
        task_accuracy(output, TARGET, "topics")


def test_a_weight_for_an_unknown_task_is_an_input_error() -> None:
    with pytest.raises(InputError, match="weights: there is no task 'moods': did you mean 'mood'"):
        MultitaskLoss(TASKS, {"moods": 2.0})
