"""Losses whose kind the sample batch alone does not show, because its samples have equal numbers of targets, or none.
On ranks whose samples differ, each equals one device or is refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.train.loss.output_form import FakeModel
from meshwright.train.loss.trial import find_loss, find_model_loss
from meshwright.train.session import Session
from tests.ranks import RankPool
from tests.train.one_process import world

SAMPLES, TOKENS, CLASSES = 12, 6, 5
ANCHORS = torch.arange(TOKENS)


class Net(nn.Module):
    """Returns scores of classes for each of a few places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, TOKENS * CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x).view(len(x), TOKENS, CLASSES)


class Frames(Net):
    """Returns log probabilities with the samples in the second dimension, as the CTC loss takes them."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x).transpose(0, 1).log_softmax(-1)


def sample(index: int, length: int) -> tuple[Tensor, dict[str, Tensor]]:
    """A vector, and targets of `length` places: classes from 1 on, the same with padding and with ignored places, and
    numbers that follow from the length."""
    draw = torch.Generator().manual_seed(index)
    is_there = length > ANCHORS
    classes = torch.randint(1, CLASSES, (TOKENS,), generator=draw)
    targets = {
        "classes": classes,
        "padded": classes * is_there,
        "ignored": classes.masked_fill(~is_there, -100),
        "is_there": is_there.double(),
        "length": torch.tensor(length),
        "weight": torch.tensor(length / 4, dtype=torch.float64),
    }
    return torch.randn(8, generator=draw, dtype=torch.float64), targets


def each(output: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(output.transpose(1, 2), target, reduction="none", **options)


def own_mean_over_valid(output: Any, target: Any) -> Tensor:
    losses = each(output, target["ignored"])
    return losses.sum() / (target["ignored"] != -100).sum()


def selected_targets(output: Any, target: Any) -> Tensor:
    valid = target["ignored"] >= 0
    return each(output[valid][:, None], target["ignored"][valid][:, None]).mean()


def without_padding(output: Any, target: Any) -> Tensor:
    losses = each(output, target["padded"], ignore_index=0)
    return losses.sum() / (target["padded"] > 0).sum().clamp(min=1)


def smoothed_and_ignored(output: Any, target: Any) -> Tensor:
    return F.cross_entropy(output.transpose(1, 2), target["ignored"], label_smoothing=0.1)


def by_length(output: Any, target: Any) -> Tensor:
    is_there = target["length"][:, None] > ANCHORS
    return (output.square().mean(-1) * is_there).sum() / target["length"].sum()


def by_weight(output: Any, target: Any) -> Tensor:
    return (output.square().mean((1, 2)) * target["weight"]).sum() / target["weight"].sum()


def mean_over_positives(output: Any, target: Any) -> Tensor:
    return ((output[..., 0] - 1).square() * target["is_there"]).sum() / target["is_there"].sum()


def with_positive_weights(output: Any, target: Any) -> Tensor:
    weight = torch.tensor(3.0, dtype=torch.float64)
    return F.binary_cross_entropy_with_logits(output[..., 0], target["is_there"].to(output.dtype), pos_weight=weight)


def divergence_batchmean(output: Any, target: Any) -> Tensor:
    soft = F.one_hot(target["classes"], CLASSES) * 0.8 + 0.04
    return F.kl_div(output.log_softmax(-1), soft.to(output.dtype), reduction="batchmean")


def focal_by_positives(output: Any, target: Any) -> Tensor:
    """The background counts in the sum, but not in the number by which it is divided."""
    truth = target["is_there"].to(output.dtype)
    losses = F.binary_cross_entropy_with_logits(output[..., 0], truth, reduction="none")
    return (losses * (output[..., 0].sigmoid() - truth) ** 2).sum() / truth.sum().clamp(min=1)


def triplet_with_mined_negatives(output: Any, target: Any) -> Tensor:
    vectors, kind = output.flatten(1), target["classes"][:, 0]
    distance, same = torch.cdist(vectors, vectors), kind[:, None] == kind
    farthest, nearest = (distance * same).amax(1), (distance + 1e3 * same).amin(1)
    return F.relu(farthest - nearest + 30).mean()


def mean_and_sum(output: Any, target: Any) -> Tensor:
    return each(output, target["classes"]).mean() + 0.01 * output.square().sum()


def connectionist_mean(output: Any, target: Any) -> Tensor:
    frames = torch.full_like(target["length"], TOKENS)
    return F.ctc_loss(output, target["classes"], frames, target["length"], zero_infinity=True)


def legacy_sum(output: Any, target: Any) -> Tensor:
    zeros: Tensor = torch.zeros_like(output)
    summed: Tensor = partial(F.mse_loss, size_average=False)(output, zeros)
    return summed


LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {
    loss.__name__: loss
    for loss in (
        own_mean_over_valid,
        selected_targets,
        without_padding,
        smoothed_and_ignored,
        by_length,
        by_weight,
        mean_over_positives,
        with_positive_weights,
        divergence_batchmean,
        focal_by_positives,
        triplet_with_mined_negatives,
        mean_and_sum,
        connectionist_mean,
        legacy_sum,
    )
}
GATHERED = {"focal_by_positives", "triplet_with_mined_negatives", "mean_and_sum"}
LENGTHS = [4, 4, 1, 1, 6, 1, 2, 1, 5, 3, 1, 1]


def samples(lengths: list[int]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    return [sample(index, length) for index, length in enumerate(lengths)]


def make_model(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return (Frames() if name.startswith("connectionist") else Net()).double()


def plain_training(name: str, lengths: list[int]) -> tuple[float, Tensor]:
    model = make_model(name)
    inputs, target = default_collate(samples(lengths))
    loss = LOSSES[name](model(inputs), target)
    loss.backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    return loss.item(), gradient


def train(rank: int, size: int, name: str, lengths: list[int]) -> tuple[float, Tensor]:
    """One step with a learning rate of 1. Returns the loss and the change of the weights."""
    model = make_model(name)
    before = model.state_dict()["layer.weight"].clone()
    session = Session(
        model,
        lambda parameters: torch.optim.SGD(parameters.values(), lr=1.0),
        loss=LOSSES[name],
        plan=Plan.model_validate({"axes": {"replicate": size}}),
        world=world(rank, size),
        sample=default_collate(samples(lengths)[:2]),
    )
    first = rank * 5  # ranks get 5 and 7 samples
    batch = default_collate(samples(lengths)[first : 5 if rank < size - 1 else None])
    loss = session.step(batch)
    return float(loss), before - session.state_dict()["layer.weight"]


@pytest.mark.parametrize("lengths", [LENGTHS, [4, 4, 3, 2, 2, *[0] * 7]], ids=["unequal", "none on a rank"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_on_two_ranks_equals_one_device(two: RankPool, name: str, lengths: list[int]) -> None:
    expected, gradient = plain_training(name, lengths)
    for loss, change in two.run(train, name, lengths):
        assert loss == pytest.approx(expected, rel=1e-9)
        torch.testing.assert_close(change, gradient, rtol=1e-9, atol=1e-12)


def kind_of(function: Callable[[Any, Any], Any], model: nn.Module | None = None, length: int = 4) -> str:
    batch = default_collate(samples([length, length]))
    return find_loss(function, FakeModel(model or Net()), batch, None).kind


@pytest.mark.parametrize("name", LOSSES)
def test_only_losses_that_need_it_get_the_samples_of_all_ranks(name: str) -> None:
    assert (kind_of(LOSSES[name], make_model(name)) == "compares_samples") == (name in GATHERED)


def test_a_loss_of_zero_tells_nothing() -> None:
    assert kind_of(without_padding, length=0) == "samples"  # found with other targets
    assert kind_of(lambda output, target: F.relu(output - 100).mean()) == "compares_samples"  # right in any case


def test_a_sum_that_draws_random_numbers_is_a_sum() -> None:
    def summed(output: Any, target: Any) -> Tensor:
        return each(F.dropout(output, 0.1), target["classes"]).sum()

    assert kind_of(summed) == "sum"


def cross_entropy_and_penalty(output: Any, target: Any) -> Tensor:
    return F.cross_entropy(output.transpose(1, 2), target["ignored"]) + 0.1 * output.square().mean()


def test_targets_that_only_later_batches_ignore_are_refused_where_they_would_be_wrong() -> None:
    loss = find_loss(cross_entropy_and_penalty, FakeModel(Net()), default_collate(samples([6, 6])), None)
    output = Net()(torch.randn(3, 8))
    whole = default_collate(samples([6, 6, 6]))[1]
    assert float(loss.function(output, whole)) == float(cross_entropy_and_penalty(output, whole))
    with pytest.raises(InputError, match=r"the sample batch has no ignored target: put a sample with ignored targets"):
        loss.function(output, default_collate(samples([6, 6, 2]))[1])
    seen = find_loss(cross_entropy_and_penalty, FakeModel(Net()), default_collate(samples([6, 2])), None)
    assert seen.kind == "compares_samples"
    alone = Session(
        Net(),
        lambda parameters: torch.optim.SGD(parameters.values(), lr=1.0),
        loss=cross_entropy_and_penalty,
        plan=Plan(),
        world=world(),
        sample=default_collate([(x.float(), target) for x, target in samples([6, 6])]),
    )
    assert float(alone.step(default_collate([(x.float(), target) for x, target in samples([6, 2])]))) > 0


def disagree(rank: int, size: int) -> str:
    with pytest.raises(InputError) as error:
        Session(
            make_model(""),
            lambda parameters: torch.optim.SGD(parameters.values(), lr=1.0),
            loss=cross_entropy_and_penalty,
            plan=Plan.model_validate({"axes": {"replicate": size}}),
            world=world(rank, size),
            sample=default_collate(samples([6, 2 if rank else 6])),
        )
    return str(error.value)


def test_ranks_that_find_different_kinds_are_refused(two: RankPool) -> None:
    assert all(
        message.startswith("ranks do not agree on what the loss is a mean over") for message in two.run(disagree)
    )


class OwnLoss(nn.Module):
    """Computes its loss itself: a mean over the places of a mask, or two means over different numbers of targets."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net = Net()
        self.kind = kind

    def forward(self, x: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.net(x)
        if self.kind == "mask":
            return {"loss": (scores[..., 0].square() * mask).sum() / mask.sum()}
        first = F.cross_entropy(scores[:, 0], labels[:, 0].clamp(min=0))
        return {"loss": first + F.cross_entropy(scores.transpose(1, 2), labels)}


@pytest.mark.parametrize("kind", ["mask", "two means"])
def test_a_model_is_also_tried_with_padding(kind: str) -> None:
    inputs, target = default_collate(samples([4, 4]))
    batch = {"x": inputs.float(), "mask": target["is_there"].long(), "labels": target["ignored"]}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = OwnLoss(kind)
    assert not find_model_loss(model, batch).is_divisible
