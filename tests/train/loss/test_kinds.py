"""Losses of every kind, as users write them, train on several ranks as on one device. What each is a mean over is found
out by trying, from the function alone."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from meshwright.data.loading import LoadingOptions, SampleShare, train_batches
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.train.loss.output_form import FakeModel
from meshwright.train.loss.trial import find_loss
from meshwright.train.session import Session
from tests.ranks import RankPool
from tests.train.one_process import world

SAMPLES, BATCH, TOKENS, CLASSES = 14, 7, 6, 5
WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0], dtype=torch.float64)


class Tokens(Dataset[dict[str, Tensor]]):
    """Rows of tokens with different lengths: the mask is 0, and the target is ignored, after the end of a row."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(index)
        mask = torch.arange(TOKENS) < 1 + (index * 5) % TOKENS
        words = torch.randint(0, CLASSES, (TOKENS,), generator=draw)
        following = torch.randint(0, CLASSES, (TOKENS,), generator=draw)
        return {"words": words, "mask": mask.long(), "next": following, "goal": following.masked_fill(~mask, -100)}


class Net(nn.Module):
    """Returns logits for each token, and one vector for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, words: Tensor, mask: Tensor, next: Tensor, goal: Tensor) -> dict[str, Tensor]:
        hidden = self.table(words).tanh()
        return {"logits": self.head(hidden), "vector": hidden.mean(1)}


def mean_over_tokens(output: Any, batch: Any) -> Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), batch["next"].flatten())


def mean_over_valid(output: Any, batch: Any) -> Tensor:
    return cross_entropy(output["logits"].transpose(1, 2), batch["goal"])


def class_weights(output: Any, batch: Any) -> Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), batch["goal"].flatten(), weight=WEIGHTS)


def mean_over_mask(output: Any, batch: Any) -> Tensor:
    each = F.cross_entropy(output["logits"].transpose(1, 2), batch["next"], reduction="none")
    return (each * batch["mask"]).sum() / batch["mask"].sum()


def mean_of_sample_means(output: Any, batch: Any) -> Tensor:
    each = F.cross_entropy(output["logits"].transpose(1, 2), batch["next"], reduction="none")
    return ((each * batch["mask"]).sum(1) / batch["mask"].sum(1)).mean()


def sum_over_tokens(output: Any, batch: Any) -> Tensor:
    return F.cross_entropy(output["logits"].transpose(1, 2), batch["next"], reduction="none").sum() * 0.01


def sum_and_count(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(output["logits"].transpose(1, 2), batch["goal"], reduction="sum")
    return total, (batch["goal"] != -100).sum()


def two_outputs(output: Any, batch: Any) -> Tensor:
    return mean_over_tokens(output, batch) + 0.3 * output["vector"].square().mean()


def negative_log_likelihood(output: Any, batch: Any) -> Tensor:
    return F.nll_loss(output["logits"].log_softmax(-1).flatten(0, 1), batch["goal"].flatten())


def smoothed(output: Any, batch: Any) -> Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), batch["goal"].flatten(), label_smoothing=0.1)


def contrastive(output: Any, batch: Any) -> Tensor:
    vectors = F.normalize(output["vector"], dim=1)
    similar = (batch["words"][:, :1] == batch["words"][:, 0]).to(vectors.dtype)
    return ((vectors @ vectors.T - similar) ** 2).mean()


def batch_deviation(output: Any, batch: Any) -> Tensor:
    return mean_over_tokens(output, batch) - 0.1 * output["vector"].std(0).mean()


DIVISIBLE: list[Callable[[Any, Any], Any]] = [
    mean_over_tokens,
    mean_over_valid,
    class_weights,
    mean_over_mask,
    mean_of_sample_means,
    sum_over_tokens,
    sum_and_count,
    two_outputs,
    negative_log_likelihood,
    smoothed,
]
COUPLED: list[Callable[[Any, Any], Any]] = [contrastive, batch_deviation]
LOSSES = {loss.__name__: loss for loss in (*DIVISIBLE, *COUPLED)}


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net().double()


def plain_training(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of plain PyTorch on one device."""
    model, losses = make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in _global_batches():
        result = LOSSES[name](model(**batch), batch)
        loss = result[0] / result[1] if isinstance(result, tuple) else result
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def _global_batches() -> Iterator[Any]:
    batches = train_batches(
        Tokens(), seed=0, global_batch=BATCH, share=SampleShare(0, 1), loading=LoadingOptions(), epochs=2
    )
    return (batch.microbatches[0].data for batch in batches)


def train(
    rank: int, size: int, name: str, plan: dict[str, Any], with_sample: bool
) -> tuple[list[float], dict[str, Tensor]]:
    session = Session(
        make_model(),
        lambda parameters: torch.optim.SGD(parameters.values(), lr=0.5),
        loss=LOSSES[name],
        plan=Plan.model_validate(plan),
        world=world(rank, size),
        sample=torch.utils.data.default_collate([Tokens()[0], Tokens()[1]]) if with_sample else None,
    )
    losses = [float(session.step(batch)) for batch in session.batches(Tokens(), 2, BATCH)]
    return losses, session.state_dict()


def check_equal(name: str, results: list[tuple[list[float], dict[str, Tensor]]]) -> None:
    losses, weights = plain_training(name)
    for rank_losses, rank_weights in results:
        assert rank_losses == pytest.approx(losses, rel=1e-9, abs=0)
        for key, value in weights.items():
            torch.testing.assert_close(rank_weights[key], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_on_one_two_and_three_ranks_equals_one_device(two: RankPool, three: RankPool, name: str) -> None:
    check_equal(name, [train(0, 1, name, {}, True)])
    check_equal(name, two.run(train, name, {"axes": {"replicate": 2}}, True))
    check_equal(name, three.run(train, name, {"axes": {"replicate": 3}}, False))


@pytest.mark.parametrize("name", [loss.__name__ for loss in DIVISIBLE])
def test_a_loss_in_microbatches_equals_one_device(two: RankPool, name: str) -> None:
    check_equal(name, two.run(train, name, {"axes": {"shard": 2}, "memory": {"accumulation": 2}}, True))


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_a_pipeline_with_one_microbatch_equals_one_device(two: RankPool, name: str) -> None:
    """The rank of the first stage computes no loss, so it does not see what the loss is divided by."""
    pipeline = {"schedule": "gpipe", "microbatches": 1, "cuts": ["table"]}
    check_equal(name, two.run(train, name, {"axes": {"pipeline": 2}, "pipeline": pipeline}, True))


@pytest.mark.parametrize("name", [loss.__name__ for loss in COUPLED])
def test_microbatches_of_a_loss_that_compares_samples_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"compares all samples .* set memory\.accumulation"):
        train(0, 1, name, {"memory": {"accumulation": 2}}, True)


def kind_of(function: Callable[[Any, Any], Any]) -> str:
    sample = torch.utils.data.default_collate([Tokens()[0], Tokens()[1]])
    return find_loss(function, FakeModel(Net()), sample, None).kind


def test_kinds_are_told_apart() -> None:
    assert kind_of(sum_over_tokens) == "sum"
    assert kind_of(mean_over_tokens) == "samples"
    assert kind_of(contrastive) == kind_of(batch_deviation) == "compares_samples"


def test_a_loss_that_draws_random_numbers_is_a_mean_over_samples() -> None:
    assert kind_of(lambda output, batch: mean_over_tokens({"logits": F.dropout(output["logits"])}, batch)) == "samples"


def test_a_loss_of_probabilities_is_tried_with_probabilities() -> None:
    def summed(output: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy(output, target, reduction="none").sum()

    model = nn.Sequential(nn.Linear(3, 2), nn.Sigmoid())
    assert find_loss(summed, FakeModel(model), (torch.randn(2, 3), torch.rand(2, 2)), None).kind == "sum"


class Deciding(nn.Module):
    """Cannot run on tensors without values, and counts its passes."""

    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("passes", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.calls += 1
        y: Tensor = self.dropout(self.norm(self.linear(x)))
        return y * 0.5 if x.sum().item() > 1e9 else y + 0.5


class Failing(Deciding):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no sample can be computed")


def test_the_loss_of_a_model_that_decides_by_values_is_tried_on_the_model_itself() -> None:
    def summed(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="sum")

    def mean(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)

    model, sample = Deciding(), (torch.randn(2, 3), torch.tensor([1, 3]))
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    before = torch.get_rng_state()
    assert find_loss(summed, FakeModel(model), sample, None).kind == "sum"
    assert find_loss(mean, FakeModel(model), sample, None).kind != "sum"
    assert torch.equal(torch.get_rng_state(), before)
    assert model.calls == 0
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    with pytest.warns(UserWarning, match="could not be tried, because the model cannot run on a few samples"):
        assert find_loss(summed, FakeModel(Failing()), sample, None).kind == "samples"


class Cache:
    """Something in a model's output that is no tensor."""


class Caching(Net):
    def forward(self, words: Tensor, mask: Tensor, next: Tensor, goal: Tensor) -> dict[str, Any]:
        return {**super().forward(words, mask, next, goal), "cache": Cache()}


def test_a_loss_is_tried_although_the_output_holds_something_else_than_tensors() -> None:
    sample = torch.utils.data.default_collate([Tokens()[0], Tokens()[1]])
    assert find_loss(sum_over_tokens, FakeModel(Caching()), sample, None).kind == "sum"


def test_a_trial_changes_neither_the_model_nor_the_random_numbers() -> None:
    model = make_model()
    sample = torch.utils.data.default_collate([Tokens()[0], Tokens()[1]])
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    before = torch.get_rng_state()
    find_loss(lambda output, batch: mean_over_valid(output, batch) + torch.rand(()), FakeModel(model), sample, None)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


class TestLongSequences:
    """A language model of 65,536 tokens and 1,000 words: a trial with all logits would need 2.6 GB."""

    def sizes_and_kind(self, function: Callable[[Tensor, Tensor], Tensor]) -> tuple[set[int], str, str]:
        words = torch.arange(65_536)[None] % 1_000
        words[:, -20_000:] = -100
        sizes = set()

        def with_sizes(output: Tensor, target: Tensor) -> Tensor:
            sizes.add(output.numel())
            return function(output, target)

        loss = find_loss(with_sizes, FakeModel(nn.Embedding(1_000, 1_000, device="meta")), (words, words), None)
        return sizes, loss.kind, type(loss.function).__name__

    def test_are_tried_on_a_part_of_the_positions(self) -> None:
        sizes, kind, function = self.sizes_and_kind(lambda o, t: cross_entropy(o.flatten(0, 1), t.flatten()))
        assert max(sizes) == 5 * 64 * 1_000
        assert (kind, function) == ("samples", "partial")  # a count of the targets that are not ignored

    def test_sums_are_found_there(self) -> None:
        sizes, kind, _ = self.sizes_and_kind(
            lambda o, t: cross_entropy(o.flatten(0, 1), t.flatten(), reduction="none").sum()
        )
        assert max(sizes) == 5 * 64 * 1_000
        assert kind == "sum"
