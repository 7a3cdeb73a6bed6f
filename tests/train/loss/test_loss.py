"""What a loss is a mean over, and that it stays so whatever a batch is cut into."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright import parallelize
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.train.loss.loss import classify_loss, loss_from_model
from meshwright.train.session import Session
from tests.train.one_process import world

GENERATOR = torch.Generator().manual_seed(0)
OUTPUT = torch.randn(12, 4, generator=GENERATOR, dtype=torch.float64)
TARGET = torch.randint(0, 4, (12,), generator=GENERATOR)
SPARSE = torch.where(torch.arange(12) % 3 == 0, -100, TARGET)
PIXELS = torch.randn(12, 4, 3, 3, generator=GENERATOR, dtype=torch.float64)
PIXEL_TARGET = torch.randint(0, 4, (12, 3, 3), generator=GENERATOR)
WEIGHT = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)


def own_mean(output: Tensor, target: Tensor) -> Tensor:
    return (output.sum(dim=1) - target).square().mean()


def sum_and_count(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output, target, reduction="sum"), (target != -100).sum()


@pytest.mark.parametrize("count", [-1, float("nan"), "3"])
def test_a_count_that_is_no_number_of_targets_is_refused(count: Any) -> None:
    loss = classify_loss(lambda output, target: (output.sum(), count))
    with pytest.raises(
        InputError, match=r"the count .*: return the number of targets that the sum is over, at least 0"
    ):
        loss.term(OUTPUT, TARGET, 12)


def test_a_negative_count_in_a_tensor_makes_the_loss_nan() -> None:
    loss = classify_loss(lambda output, target: (output.sum(), torch.tensor(-1)))
    assert loss.term(OUTPUT, TARGET, 12).value.isnan()
    assert loss.mean(OUTPUT, TARGET).isnan()


def test_a_negative_count_is_refused_before_training() -> None:
    model = nn.Linear(4, 4).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="the count -1"):
        parallelize(model, optimizer, loss=negative_count, device="cpu", sample_batch=(OUTPUT, TARGET))


def negative_count(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output, target, reduction="sum"), torch.tensor(-1)


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (F.cross_entropy, "targets"),
        (partial(F.cross_entropy, label_smoothing=0.1), "targets"),
        (nn.CrossEntropyLoss(), "targets"),
        (nn.NLLLoss(), "targets"),
        (F.nll_loss, "targets"),
        (nn.CrossEntropyLoss(reduction="sum"), "sum"),
        (partial(F.mse_loss, reduction="sum"), "sum"),
        (nn.MSELoss(), "samples"),
        (own_mean, "samples"),
    ],
)
def test_the_kind_of_a_loss_is_recognized(function: Any, kind: str) -> None:
    assert classify_loss(function).kind == kind


@pytest.mark.parametrize(
    ("function", "output", "target"),
    [
        (F.cross_entropy, OUTPUT, TARGET),
        (F.cross_entropy, OUTPUT, SPARSE),
        (partial(F.cross_entropy, ignore_index=2), OUTPUT, TARGET),
        (nn.CrossEntropyLoss(ignore_index=1, label_smoothing=0.2), OUTPUT, TARGET),
        (nn.CrossEntropyLoss(weight=WEIGHT), OUTPUT, SPARSE),
        (partial(F.cross_entropy, weight=WEIGHT, label_smoothing=0.1), OUTPUT, SPARSE),
        (nn.CrossEntropyLoss(weight=WEIGHT), OUTPUT, OUTPUT.softmax(1)),
        (F.cross_entropy, PIXELS, PIXEL_TARGET),
        (F.cross_entropy, PIXELS, PIXELS.softmax(1)),
        (nn.NLLLoss(), OUTPUT.log_softmax(1), SPARSE),
        (own_mean, OUTPUT, TARGET),
        (nn.MSELoss(), OUTPUT, OUTPUT.flip(0)),
        (nn.MSELoss(reduction="sum"), OUTPUT, OUTPUT.flip(0)),
    ],
)
def test_uneven_parts_add_up_to_the_loss_of_the_whole(function: Any, output: Tensor, target: Tensor) -> None:
    loss = classify_loss(function)
    total, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for begin, end in ((0, 1), (1, 4), (4, 12)):
        part = target[begin:end]
        term = loss.term(output[begin:end], part, end - begin)
        part_count = loss.count(part, end - begin) if term.returned_count is None else term.returned_count
        total, count = total + term.sum, count + part_count
    mean = total if loss.kind == "sum" else total / count
    assert float(mean) == pytest.approx(float(function(output, target)), rel=1e-12)


def test_a_filler_batch_adds_nothing() -> None:
    for function in (F.cross_entropy, own_mean, sum_and_count, nn.CrossEntropyLoss(reduction="sum")):
        loss = classify_loss(function)
        term = loss.term(OUTPUT[:1], TARGET[:1], 0)
        assert float(term.sum) == 0.0
        assert float(loss.count(TARGET[:1], 0) if term.returned_count is None else term.returned_count) == 0.0


@pytest.mark.parametrize(
    "function",
    [F.cross_entropy, nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1), sum_and_count],
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_no_target_at_all_is_a_gradient_of_zero(function: Any, accumulation: int) -> None:
    model = nn.Linear(3, 4).double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = Plan.model_validate({"memory": {"accumulation": accumulation}})
    session = Session(
        model, lambda parameters: torch.optim.SGD(parameters.values(), lr=1.0), loss=function, plan=plan, world=world()
    )
    session.step((torch.randn(6, 3, dtype=torch.float64), torch.full((6,), -100)))
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_model_may_return_its_loss() -> None:
    class Output:
        loss = torch.tensor(3.0)

    for output in (torch.tensor(3.0), Output(), {"loss": torch.tensor(3.0), "logits": OUTPUT}):
        assert float(loss_from_model().term(output, None, 2).sum) == 6.0
    with pytest.raises(InputError, match="the job has no loss, and the model returned Tensor without one"):
        loss_from_model().term(OUTPUT, None, 2)


def test_results_that_are_no_loss_are_refused() -> None:
    with pytest.raises(InputError, match=r"the loss returned a tensor of shape \(12, 4\): return one number"):
        classify_loss(lambda output, target: output).term(OUTPUT, TARGET, 12)
    with pytest.raises(InputError, match="reduction='none'"):
        classify_loss(nn.MSELoss(reduction="none"))


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (F.cross_entropy, torch.full((12,), -100)),
        (partial(F.cross_entropy, label_smoothing=0.1), torch.full((12,), -100)),
        (nn.NLLLoss(ignore_index=3), torch.full((12,), 3)),
        (nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1.0, 1.0, 1.0])), torch.zeros(12, dtype=torch.int64)),
        (sum_and_count, torch.full((12,), -100)),
        (lambda output, target: F.cross_entropy(output, target), torch.full((12,), -100)),
    ],
)
def test_a_batch_without_valid_targets_has_loss_0_and_no_gradient(loss: Any, target: Tensor) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    session = Session(
        model,
        lambda parameters: torch.optim.SGD(parameters.values(), lr=1.0),
        loss=loss,
        plan=Plan(),
        world=world(0, 1),
        sample=(OUTPUT.float(), TARGET),
    )
    assert float(session.step((OUTPUT.float(), target))) == 0
    torch.testing.assert_close(session.state_dict()["weight"], before, rtol=0, atol=0)
