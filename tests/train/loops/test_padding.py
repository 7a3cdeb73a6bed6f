"""Samples of different lengths that a collate function pads to the longest of a batch: ranks train as one process does
with whole batches, whether padding counts in the loss or not."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

import meshwright as mw
from meshwright.data.collate.dependence import find_dependence
from meshwright.data.loading import LoadingOptions
from meshwright.data.order import permutation
from tests.ranks import RankFailure, RankPool

SIZE, BATCH = 18, 8
TOKENS = 10


class Texts(Dataset[Any]):
    """Texts of different lengths, with a target for each token."""

    shortest, longest = 2, 12

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(self.shortest, self.longest, (1,), generator=generator))
        x, y = torch.randint(1, TOKENS, (2, length), generator=generator)
        return x, y


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (Texts()[index] for index in range(SIZE))


def pad(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Padding is token 0, also of the targets."""
    x, y = (pad_sequence(list(part), batch_first=True) for part in zip(*samples, strict=True))
    return x, y


def pad_with_ignored(samples: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = pad(samples)
    return x, y.masked_fill(y == 0, -100)


def pad_to_classify(samples: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = pad(samples)
    return x, y[:, 0]


class Tagger(nn.Module):
    """Gives each token a class by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(TOKENS, 6)
        self.head = nn.Linear(6, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.embedding(x))).transpose(1, 2)
        return out


class Classifier(Tagger):
    """Takes the mean over all positions of a text, padding included."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(x).mean(1))
        return out


class ZeroClassifier(Classifier):
    """Begins with a last layer of zeros, whose output does not depend on the input."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.head.weight)


class MaskedClassifier(Tagger):
    """Takes the mean over the tokens of a text."""

    def forward(self, x: Tensor) -> Tensor:
        mask = (x != 0).unsqueeze(-1)
        out: Tensor = self.head((self.embedding(x) * mask).sum(1) / mask.sum(1))
        return out


CASES: dict[str, tuple[type[Tagger], Any]] = {
    "counted in a mean": (Tagger, pad),
    "ignored by the loss": (Tagger, pad_with_ignored),
    "seen by the model": (Classifier, pad_to_classify),
    "seen by a model that begins with zeros": (ZeroClassifier, pad_to_classify),
    "masked by the model": (MaskedClassifier, pad_to_classify),
}
Result = tuple[list[float], dict[str, Tensor]]


def plain(case: str) -> Result:
    kind, collate = CASES[case]
    model = kind().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for x, y in DataLoader(Texts(), batch_size=BATCH, collate_fn=collate):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, dict(model.state_dict())


def planned(rank: int, size: int, case: str, axes: Mapping[str, int], accumulation: int, data: str) -> Any:
    """Returns losses and weights, and whether whole batches were collated."""
    kind, collate = CASES[case]
    model = kind().double()
    template = torch.optim.SGD(model.parameters(), lr=0.5)
    plan = {"axes": dict(axes), "memory": {"accumulation": accumulation}}
    session = mw.parallelize(model, template, loss=F.cross_entropy, plan=plan, device="cpu")
    if data == "batches":
        order = _InOrder(session.seed)
        batches: Any = session.batches(order, 1, BATCH, LoadingOptions(collate=collate))
    else:
        dataset: Any = Stream() if data == "stream" else Texts()
        batches = session.prepare(DataLoader(dataset, batch_size=BATCH, collate_fn=collate))
    losses = [float(session.step(batch)) for batch in batches]
    whole = [chosen for _, chosen in session._collation._chosen.values()]
    return losses, {name: value.clone() for name, value in session.state_dict().items()}, whole


class _InOrder(Texts):
    """The texts in an order that becomes that of `Texts` when a session's first epoch shuffles them."""

    def __init__(self, seed: int) -> None:
        self.positions = permutation(seed, 0, SIZE).argsort()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return super().__getitem__(int(self.positions[index]))


def assert_equal(results: list[Any], expected: Result, whole: bool) -> None:
    for losses, state, chosen in results:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[0]), rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(state, expected[1], rtol=1e-11, atol=1e-12)
        assert chosen == [whole]


@pytest.mark.parametrize("case", CASES)
def test_ranks_pad_to_the_longest_of_the_whole_batch_where_it_matters(two: RankPool, case: str) -> None:
    matters = "counted" in case or "seen" in case
    assert_equal(two.run(planned, case, {"replicate": 2}, 1, "prepare"), plain(case), whole=matters)


@pytest.mark.parametrize("data", ["batches", "stream"])
@pytest.mark.parametrize("axes", [{"replicate": 2}, {"shard": 2}], ids=str)
def test_data_sets_and_streams(two: RankPool, axes: dict[str, int], data: str) -> None:
    case = "counted in a mean"
    assert_equal(two.run(planned, case, axes, 1, data), plain(case), whole=True)


@pytest.mark.parametrize("data", ["batches", "prepare"])
def test_microbatches(three: RankPool, data: str) -> None:
    case = "seen by the model"
    assert_equal(three.run(planned, case, {"replicate": 3}, 2, data), plain(case), whole=True)
    assert_equal([planned(0, 1, case, {"replicate": 1}, 2, data)], plain(case), whole=True)


def evaluated(rank: int, size: int) -> float:
    model = Tagger().double()
    session = mw.parallelize(model, loss=F.cross_entropy, plan={"axes": {"replicate": size}}, device="cpu")
    result = session.evaluate(Texts(), batch=BATCH, loading=LoadingOptions(collate=pad))
    assert result is not None
    return result["loss"]


def test_evaluation(two: RankPool) -> None:
    model = Tagger().double()
    total = 0.0
    for x, y in DataLoader(Texts(), batch_size=BATCH, collate_fn=pad):
        total += float(F.cross_entropy(model(x), y).detach()) * y.numel()
    tokens = sum(y.numel() for _, y in DataLoader(Texts(), batch_size=BATCH, collate_fn=pad))
    for loss in two.run(evaluated):
        assert loss == pytest.approx(total / tokens, rel=1e-12)


def by_parts(rank: int, size: int) -> None:
    model = Tagger().double()
    session = mw.parallelize(model, loss=F.cross_entropy, plan={"axes": {"replicate": size}}, device="cpu")
    next(session.batches(Texts(), 1, BATCH, LoadingOptions(collate=pad, partition="sample")))


def test_parts_of_a_data_set_cannot_be_collated_whole(two: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"the collate function pad \(.*test_padding.py, line \d+\) pads to the long"):
        two.run(by_parts)


# ---- which collate functions depend on the batch


class Equal(Texts):
    shortest, longest = 5, 6


def centered(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Its values depend on the batch, its shapes do not."""
    x, y = pad(samples)
    return x - x.double().mean(0), y


def noisy(samples: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = pad(samples)
    return x + torch.rand(x.shape), y


def packed(samples: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.cat([x for x, _ in samples]), torch.cat([y for _, y in samples])


@pytest.mark.parametrize(
    ("dataset", "collate", "pads"),
    [
        (Texts(), pad, True),
        (Equal(), pad, None),
        (Equal(), centered, False),
        (Equal(), noisy, None),
        (Texts(), packed, None),
        (Texts(), lambda samples: {"text": [str(x) for x, _ in samples], "y": pad(samples)[1]}, True),
        (Texts(), lambda samples: tuple(zip(*samples, strict=True)), None),
    ],
)
def test_dependence_on_the_batch(dataset: Any, collate: Any, pads: bool | None) -> None:
    dependence = find_dependence(dataset, collate, 0)
    assert (dependence.pads if dependence else None) is pads
