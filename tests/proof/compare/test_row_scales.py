"""Errors are measured by rows: a wrong row is found however small it is, and what only rounding decides is not."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from meshwright.plan import Plan
from meshwright.proof.compare.row_scales import FEWEST_ERRORS, SAFETY_FACTOR, row_scales, slice_scales, weight_scales
from meshwright.proof.compare.tolerance import LAMBDA, SumTolerance
from meshwright.proof.request import ProofRequest, UserModel
from meshwright.train.session import Session
from tests.proof.cases import prove_in_pool
from tests.proof.injected_fault import InjectedFault
from tests.ranks import RankPool

TOLERANCE = SumTolerance(terms=100, depth=2, dtype=torch.float64)


def test_the_scale_of_an_element_is_that_of_its_smallest_slice() -> None:
    matrix = torch.tensor([[8.0, -4.0], [2.0, 1.0]])
    assert slice_scales(matrix).tolist() == [[8.0, 4.0], [2.0, 2.0]]
    experts = torch.tensor([[[4.0, 4.0]], [[0.0, 0.0]]])
    assert slice_scales(experts).tolist() == [[[4.0, 4.0]], [[0.0, 0.0]]]
    assert slice_scales(torch.tensor([3.0, -2.0, torch.nan])).tolist() == [3.0, 2.0, 0.0]
    assert slice_scales(torch.tensor(-5.0)).item() == 5.0


def scales_of(value: Tensor, error: Tensor, layer: float, drift: float = 0.0) -> Tensor:
    return torch.as_tensor(
        row_scales({"a.weight": value}, {"a.weight": layer}, {"a.weight": error}, TOLERANCE, drift)["a.weight"]
    )


def test_no_scale_is_below_what_rounding_explains_or_above_that_of_the_layer() -> None:
    value = torch.logspace(0, -15, 16, dtype=torch.float64)
    error = torch.full((16,), 1e-18, dtype=torch.float64)
    scales = scales_of(value, error, layer=0.5)
    floor = SAFETY_FACTOR * 1e-18 / TOLERANCE.first_step
    assert scales.tolist() == pytest.approx([min(0.5, max(size, floor)) for size in value.tolist()])
    assert 0 < floor < 1e-3
    assert scales_of(value, torch.full_like(error, torch.inf), layer=0.5).tolist() == [0.5] * 16


def test_the_largest_of_a_few_errors_is_not_trusted() -> None:
    value, few = torch.full((16,), 1e-15, dtype=torch.float64), torch.zeros(16, dtype=torch.float64)
    few[: FEWEST_ERRORS - 1] = 1e-30
    many = few.clone()
    many[FEWEST_ERRORS - 1] = 1e-30
    usual = LAMBDA * torch.finfo(torch.float64).eps / TOLERANCE.first_step
    assert scales_of(value, few, layer=1.0).tolist() == pytest.approx([usual] * 16)
    assert scales_of(value, many, layer=1.0).tolist() == pytest.approx([1e-15] * 16)


def test_drift_counts_by_layers() -> None:
    value, error = torch.full((16,), 1e-9, dtype=torch.float64), torch.full((16,), 1e-30, dtype=torch.float64)
    allowed = TOLERANCE.with_drift(1e-10) * scales_of(value, error, layer=1.0, drift=1e-10)
    assert allowed.tolist() == pytest.approx([TOLERANCE.first_step * 1e-9 + 2 * 2 * 1e-10] * 16)


def test_a_weight_may_be_off_by_roundings_of_its_row_and_of_its_changes() -> None:
    before = {"a.weight": torch.tensor([[1.0, 1.0], [1e-6, 1e-6]], dtype=torch.float64)}
    eps, tolerance = torch.finfo(torch.float64).eps, TOLERANCE.first_step
    scales = torch.as_tensor(weight_scales(before, before, {"a.weight": 1e-9}, 2, tolerance, eps)["a.weight"])
    allowed = (tolerance * scales)[:, 0].tolist()
    assert allowed == pytest.approx([2 * LAMBDA * eps * size + tolerance * 1e-9 for size in (1.0, 1e-6)])


# ---- in ranks


class Signals(Dataset[Any]):
    def __init__(self, size: int = 128) -> None:
        generator = torch.Generator().manual_seed(size)
        self.x = torch.randn(size, 32, 8, generator=generator)
        self.y = torch.randint(0, 4, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


SIZES = [1.0] * 12 + [1e-2, 1e-4, 1e-6, 1e-8]


class Rows(nn.Module):
    """The features have very different sizes, and so have the gradients of one layer's rows and another's columns."""

    sizes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("sizes", torch.tensor(SIZES))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).tanh() * self.sizes).mean(1)
        return out


@dataclass(frozen=True)
class WrongSlice(InjectedFault):
    """Multiplies one slice of a gradient by a factor, or takes the one of another row for it."""

    parameter: str
    dim: int
    index: int
    factor: float | None

    def on_gradients(self, session: Session, step: int) -> None:
        for name, parameter in session.module.named_parameters():
            if name.endswith(self.parameter):
                assert parameter.grad is not None
                wrong = parameter.grad.select(self.dim, self.index)
                right = parameter.grad.select(self.dim, self.index - 1 if self.factor is None else self.index).clone()
                wrong.copy_(right * (1e-2 if self.factor is None else self.factor))


def request_of(
    model: nn.Module, data: Any, optimizer: str = "sgd", *, batch: int = 64, seed: int = 0, **options: Any
) -> ProofRequest:
    kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    template = kinds[optimizer](model.parameters(), lr=0.01)
    user_model = UserModel(model, template, nn.CrossEntropyLoss(), data, batch, seed=seed)
    return ProofRequest(user_model, Plan.model_validate({"axes": {"replicate": 2}}), **{"steps": 1, **options})


@pytest.fixture
def rows() -> ProofRequest:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return request_of(Rows(), Signals())


# A row's number and size, the factor (None: the row before it, as large as this one), and the precision.
WRONG = [
    (13, 2.0, "fp32"),
    (13, -1.0, "fp32"),
    (13, None, "fp32"),
    (13, 2.0, "fp64"),
    (14, -1.0, "fp64"),
    (14, None, "fp64"),
    (14, 1 + 1e-7, "fp64"),
    (15, 2.0, "fp64"),
]


@pytest.mark.parametrize(("parameter", "dim"), [("up.weight", 0), ("up.bias", 0), ("down.weight", 1)])
def test_a_wrong_row_is_found_however_small_it_is(
    two: RankPool, rows: ProofRequest, tmp_path: Path, parameter: str, dim: int
) -> None:
    for index, factor, dtype in WRONG:
        fault = WrongSlice(parameter, dim, index, factor)
        proof = two.run(prove_in_pool, replace(rows, dtype=dtype, prepare_session=fault), tmp_path)[0]
        first = proof["first_difference"]
        assert first, (parameter, index, factor, dtype)
        assert (first["what"], first["parameter"]) == ("gradient", parameter)


class Oddities(nn.Module):
    """Gradients that are zero, or zero but for rounding: words that do not occur, features whose ReLU is never active,
    biases of a layer before BatchNorm and of keys, BatchNorm over two samples, and a number that is added to all
    scores."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.dead, self.narrow = nn.Linear(8, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(3)
        self.few, self.norm_of_few = nn.Linear(24, 5), nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 4)
        self.shift = nn.Parameter(torch.zeros(()))
        nn.init.constant_(self.dead.bias[:4], -100.0)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[:, :8, 0].abs() * 8).long().clamp(max=20)
        embedded = self.words(tokens)
        attended = embedded + self.attention(embedded, embedded, embedded, need_weights=False)[0]
        features = self.narrow(self.dead(attended).relu() + attended)
        features = self.norm(features.transpose(1, 2)).flatten(1)
        out: Tensor = self.head(self.norm_of_few(self.few(features))) + self.shift
        return out


@pytest.mark.parametrize(("optimizer", "axis"), [("sgd", "replicate"), ("adamw", "shard")])
def test_what_only_rounding_decides_is_no_difference(two: RankPool, tmp_path: Path, optimizer: str, axis: str) -> None:
    for seed in range(3):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            # two samples for each rank's BatchNorm
            request = request_of(Oddities(), Signals(), optimizer, batch=4, seed=seed, steps=3)
        plan = Plan.model_validate({"axes": {axis: 2}})
        for dtype in ("fp64", "fp32"):
            proof = two.run(prove_in_pool, replace(request, plan=plan, dtype=dtype), tmp_path)[0]
            assert proof["equal"], (seed, dtype, proof["first_difference"])
