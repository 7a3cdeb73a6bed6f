"""An optimizer that looks at whole tensors is refused where ranks hold parts of them; all others are used."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

import meshwright
from meshwright.errors import InputError
from meshwright.parallel.weights.layout import ParameterLayout, shard_layout, whole_on_one_rank
from meshwright.plan import Plan
from meshwright.profile import optimizer as known_optimizers
from meshwright.train.loop_checks.optimizer_trial import check_optimizer_on_parts, checker_of_optimizer
from tests.ranks import RankPool
from validation.fuzz.training.optimizers import Lamb, Lars, Lion, MuonAndSgd, Shampoo

Make = Callable[[Any], torch.optim.Optimizer]


class RowNorms(torch.optim.Optimizer):
    """Normalizes each row of a gradient: rows may be divided, columns may not."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(weight.grad / weight.grad.norm(dim=-1, keepdim=True), alpha=group["lr"])


class ManyColumns(RowNorms):
    """The same for tensors with at least 128 columns; smaller ones are updated by elements."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                is_large = weight.shape[-1] >= 128
                weight.sub_(
                    weight.grad / (weight.grad.norm(dim=-1, keepdim=True) if is_large else 2), alpha=group["lr"]
                )


class Noise(RowNorms):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                weight.add_(torch.randn_like(weight), alpha=group["lr"])


class Lookup(RowNorms):
    """Knows only the weights that it was made for."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise KeyError("no such weight")


SHAPES = {"matrix": (300, 320), "experts": (2, 8, 6), "vector": (300,)}


def check(make: Make, name: str, dim: int) -> None:
    """Checks an optimizer whose parameter has this name, and is divided along the dimension."""
    layout = shard_layout(SHAPES[name], dim, (), "tensor", 2, 0)
    local = list(layout.shape)
    local[dim] //= 2
    parameter = nn.Parameter(torch.ones(local))
    optimizer = make([parameter])
    state, states = torch.get_rng_state(), len(optimizer.state)
    check_optimizer_on_parts(optimizer, {name: parameter}, {name: layout})
    assert torch.equal(torch.get_rng_state(), state)
    assert len(optimizer.state) == states
    assert torch.equal(parameter, torch.ones(local))
    assert parameter.grad is None


ELEMENTWISE: dict[str, Make] = {
    **{
        kind.__name__: lambda p, kind=kind: kind(p, lr=1e-3)  # type: ignore[misc]
        for kind in known_optimizers._ELEMENTWISE
    },
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "tensor rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3)),
    "rate 0": lambda p: Lion(p, lr=0.0),
    "small rate": lambda p: Lion(p, lr=1e-7),
    "Lion": lambda p: Lion(p, lr=1e-3, decay=0.1),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_optimizers_that_update_elements_are_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_optimizers, "_ELEMENTWISE", ())  # so that torch's are tried as well
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for shape, dim in (("matrix", 0), ("matrix", 1), ("vector", 0), ("experts", 0)):
            check(ELEMENTWISE[name], shape, dim)


WHOLE: dict[str, Make] = {
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "Muon": lambda p: torch.optim.Muon(p, lr=1e-2),
    "Lars": Lars,
    "Lamb": Lamb,
    "Shampoo": Shampoo,
    "MuonAndSgd": MuonAndSgd,
}


@pytest.mark.parametrize("name", WHOLE)
def test_optimizers_that_look_at_whole_tensors_are_refused(name: str) -> None:
    for dim in (0, 1):
        with pytest.raises(InputError, match=rf"{name} looks at whole tensors, but axes.tensor .* divides matrix") as e:
            check(WHOLE[name], "matrix", dim)
        assert f"(300 × 320) along dimension {dim}" in str(e.value)


def test_the_dimension_and_the_size_of_a_weight_decide() -> None:
    check(lambda p: RowNorms(p, lr=0.1), "matrix", 0)
    with pytest.raises(InputError, match="RowNorms looks at whole tensors"):
        check(lambda p: RowNorms(p, lr=0.1), "matrix", 1)
    check(lambda p: RowNorms(p, lr=0.1), "experts", 0)
    with pytest.raises(InputError, match="ManyColumns looks at whole tensors"):
        check(lambda p: ManyColumns(p, lr=0.1), "matrix", 1)
    check(lambda p: MuonAndSgd(p), "vector", 0)


def test_optimizers_that_cannot_be_tried_are_used_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"Noise updates matrix, .* could not be tried .*: it draws random numbers"):
        check(lambda p: Noise(p, lr=0.1), "matrix", 0)
    with pytest.warns(UserWarning, match=r"Lookup updates matrix, .*: KeyError: 'no such weight'"):
        check(lambda p: Lookup(p, lr=0.1), "matrix", 0)


def test_weights_that_a_rank_holds_whole_are_not_looked_at() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    layouts: dict[str, ParameterLayout] = {"expert": whole_on_one_rank(weight, "expert")}
    check_optimizer_on_parts(Lamb([weight]), {"expert": weight}, layouts)
    check_optimizer_on_parts(Lamb([weight]), {"expert": weight}, {})
    with pytest.raises(InputError, match="Lamb looks at whole tensors"):  # of which a rank has a part
        check(Lamb, "matrix", 0)


def problem_on_shards(make: Make, placement: Any) -> str | None:
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [placement]))
    assert isinstance(weight, DTensor)
    try:
        check_optimizer_on_parts(make([weight]), {"weight": weight}, {})
    except InputError as error:
        return str(error)
    return None


def check_shards(rank: int, size: int) -> None:
    for make in (Lion, Lamb, lambda p: RowNorms(p, lr=0.1)):  # torch's DTensor takes norms over all ranks
        assert (problem := problem_on_shards(make, Shard(0))) is None, problem
    for kind in (Shampoo, torch.optim.Adafactor, _LocalNorm):
        problem = problem_on_shards(kind, Shard(0))
        assert problem is not None
        assert problem.startswith(f"optimizer: {kind.__name__} looks at whole tensors, but axes.shard")
        assert "\n" not in problem


class _LocalNorm(Lamb):
    """Takes norms of what the rank holds: no error, but another update."""

    def direction(self, weight: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        return gradient * float(local.norm())


def test_sharded_weights_are_tried_as_torch_divides_them(two: RankPool) -> None:
    two.run(check_shards)


def refuse_in_a_session(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    batch = (torch.randn(4, 8), torch.randint(4, (4,)))
    plan = {"axes": {"tensor": 2}}
    loss = nn.functional.cross_entropy
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    with pytest.raises(InputError, match=r"Adafactor looks at whole tensors, but axes.tensor .* divides 0\.weight"):
        meshwright.parallelize(model, optimizer, loss=loss, plan=plan, sample_batch=batch, device="cpu", check=False)


def test_a_session_refuses_such_an_optimizer_where_the_plan_splits_weights(two: RankPool) -> None:
    two.run(refuse_in_a_session)


def test_a_search_proposes_no_plan_that_splits_what_the_optimizer_has_to_see_whole() -> None:
    layers = nn.Sequential(nn.Embedding(4, 4096), nn.Linear(4096, 16384), nn.ReLU(), nn.Linear(16384, 4096))
    model = layers.to("meta")
    batch = (torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, 4096))
    options: dict[str, Any] = {"loss": nn.functional.mse_loss, "global_batch": 1, "cluster": "2xH100"}
    plans = [
        meshwright.best_plan(model, batch, optimizer=make(model.parameters()), **options) for make in (Lion, Shampoo)
    ]
    assert [plan.axes.tensor for plan in plans] == [2, 1]
    check = checker_of_optimizer(Shampoo(model.parameters()))
    check(Plan.model_validate({"axes": {"pipeline": 2}}))
    with pytest.raises(InputError, match="Shampoo looks at whole tensors"):
        check(Plan.model_validate({"axes": {"tensor": 2}}))
    checker_of_optimizer(None)(Plan.model_validate({"axes": {"tensor": 2}}))
