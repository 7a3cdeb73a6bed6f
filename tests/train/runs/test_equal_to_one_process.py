"""The mean invariant: final weights on 1, 2, 3 and 4 ranks are those of a bare PyTorch loop on the same batches.

fp64, so that a wrong weight anywhere stands far above rounding. The data's size leaves a last batch of one
sample, so most ranks have no share of it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from meshwright.data.order import batches_per_epoch, permutation
from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.train.session import Parameters, Session
from tests.ranks import ranks
from tests.soaked import all_but

SIZE, BATCH, EPOCHS, SEED = 33, 8, 2, 5
TOLERANCE = 1e-9


class Points(Dataset[Any]):
    """As tuples or dicts; a third of the targets ignored, unevenly: all at the set's beginning."""

    def __init__(self, kind: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(SIZE, 1, 8, 8, dtype=torch.float64, generator=generator)
        self.y = torch.randint(0, 4, (SIZE,), generator=generator)
        self.kind = kind
        if kind == "ignored":
            self.y[: SIZE // 3] = -100

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        if self.kind == "dict":
            return {"image": self.x[index], "label": self.y[index]}
        return self.x[index], self.y[index]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(4 * 6 * 6, 4)

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.head(self.conv(image).relu().flatten(1))
        return out


class Unused(Plain):
    """A head that is never called, and one that only some batches call: some ranks use it, some do not."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(3, 3)
        self.sometimes = nn.Linear(4, 4)

    def forward(self, image: Tensor) -> Tensor:
        out = super().forward(image)
        return out + self.sometimes(out) if float(image.sum().detach()) > 0 else out


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(64, 16, bias=False)
        self.middle = nn.Linear(16, 16)
        self.decode = nn.Linear(16, 16, bias=False)
        self.decode.weight = self.middle.weight
        self.head = nn.Linear(16, 4)

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.middle(self.encode(image.flatten(1)).relu())
        out: Tensor = self.head(self.decode(hidden))
        return out


def sum_and_count(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output, target, reduction="sum"), (target != -100).sum()


def squared(output: Tensor, target: Tensor) -> Tensor:
    """A user's own loss: a mean over samples."""
    return (output - F.one_hot(target, 4)).square().sum(dim=1).mean()


Case = tuple[type[nn.Module], str, Any, int]
CASES: dict[str, Case] = {
    "plain": (Plain, "tuple", F.cross_entropy, 1),
    "own loss": (Plain, "tuple", squared, 1),
    "accumulated": (Plain, "tuple", squared, 2),
    "unused parameters": (Unused, "tuple", F.cross_entropy, 1),
    "tied weights": (Tied, "tuple", F.cross_entropy, 1),
    "dict": (Plain, "dict", F.cross_entropy, 1),
    "ignored targets": (Plain, "ignored", nn.CrossEntropyLoss(), 1),
    "ignored, accumulated": (Tied, "ignored", nn.CrossEntropyLoss(label_smoothing=0.1), 3),
    "sum and count": (Plain, "ignored", sum_and_count, 2),
    "class weights": (Plain, "ignored", nn.CrossEntropyLoss(weight=torch.arange(1.0, 5.0).double()), 1),
    "sum": (Plain, "tuple", nn.CrossEntropyLoss(reduction="sum"), 1),
}


def make(case: Case) -> tuple[nn.Module, Callable[[Parameters], torch.optim.Optimizer]]:
    torch.manual_seed(0)
    return case[0]().double(), lambda parameters: torch.optim.AdamW(parameters.values(), lr=0.01, weight_decay=0.1)


def bare_loop(case: Case) -> tuple[dict[str, Tensor], list[float]]:
    """A plain PyTorch training loop for one process."""
    model, make_optimizer = make(case)
    optimizer, data, losses = make_optimizer(dict(model.named_parameters())), Points(case[1]), []
    for epoch in range(EPOCHS):
        order = permutation(SEED, epoch, SIZE)
        for index in range(batches_per_epoch(SIZE, BATCH, False)):
            batch = default_collate([data[int(i)] for i in order[index * BATCH : (index + 1) * BATCH]])
            x, y = (batch["image"], batch["label"]) if isinstance(batch, dict) else batch
            loss = case[2](_halves(model, x) if case[0] is Unused else model(x), y)
            if isinstance(loss, tuple):
                loss = loss[0] / loss[1].clamp(min=1)
            if not torch.isfinite(loss):  # a mean over no target at all
                loss = model(x).sum() * 0
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(float(loss.detach()))
    return model.state_dict(), losses


def _halves(model: nn.Module, x: Tensor) -> Tensor:
    """`Unused` decides by the sum of its input: in the reference, for each sample."""
    return torch.cat([model(sample) for sample in x.split(1)])


def train_here(rank: int, world_size: int, name: str) -> tuple[dict[str, Tensor], list[float]]:
    case = CASES[name]
    model, make_optimizer = make(case)
    if case[0] is Unused:
        model = _SampleWise(model)
    plan = Plan.model_validate(
        {"axes": {"replicate": world_size}, "memory": {"accumulation": case[3]}, "gradients": {"bucket_bytes": 500}}
    )
    world = World(rank, rank, world_size, world_size, 0, torch.device("cpu"), None)
    session = Session(model, make_optimizer, loss=case[2], plan=plan, world=world, clip_norm=0.5, seed=SEED)
    batches = session.batches(Points(case[1]), epochs=EPOCHS, global_batch=max(BATCH, world_size * case[3]))
    losses = [float(session.step(batch)) for batch in batches]
    return {key.removeprefix("inner."): value for key, value in session.state_dict().items()}, losses


class _SampleWise(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, image: Tensor) -> Tensor:
        return _halves(self.inner, image)


def assert_equal(
    actual: tuple[dict[str, Tensor], list[float]], expected: tuple[dict[str, Tensor], list[float]]
) -> None:
    for name, value in expected[0].items():
        error = float((actual[0][name] - value).abs().max() / value.abs().max())
        assert error <= TOLERANCE, f"{name} is {error:.2e} off"
    assert actual[1] == pytest.approx(expected[1], rel=TOLERANCE, abs=1e-12)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[3] * 1 <= BATCH])
def test_one_rank_trains_as_a_bare_loop_does(name: str) -> None:
    assert_equal(train_here(0, 1, name), bare_loop(CASES[name]))


@pytest.mark.core
@pytest.mark.parametrize("world_size", all_but([3], [2, 3, 4]))
def test_ranks_train_as_one_process_does(world_size: int) -> None:
    with ranks(world_size) as pool:
        for name, case in CASES.items():
            if world_size * case[3] > BATCH:
                continue
            expected = bare_loop(case)
            results = pool.run(train_here, name)
            for result in results:
                assert_equal(result, expected)
