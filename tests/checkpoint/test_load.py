"""A checkpoint loads under any number of ranks, by parameter name, and says where it is of another model."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import CheckpointError
from meshwright.plan import Plan
from meshwright.train.session import Parameters, Session
from tests.ranks import RankPool
from tests.train.one_process import equal_states, world
from tests.train.toy import points


class TiedModel(nn.Module):
    """Tied weights, a buffer, and a layer that is never used."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(20, width)
        self.norm = nn.BatchNorm1d(width)
        self.again = nn.Linear(width, width, bias=False)
        self.more = nn.Linear(width, width)
        self.more.weight = self.again.weight
        self.head = nn.Linear(width, 5)
        self.never = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.more(self.again(self.norm(self.first(x)))))
        return out


def session_of(rank: int, size: int, seed: int, model: nn.Module | None = None) -> Session:
    torch.manual_seed(seed)

    def make_optimizer(parameters: Parameters) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters.values() if p.dim() > 1]},
            {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=0.01)

    plan = Plan.model_validate({"axes": {"replicate": size}})
    return Session(
        model or TiedModel(), make_optimizer, loss=F.cross_entropy, plan=plan, world=world(rank, size), seed=1
    )


def moments(session: Session) -> dict[str, Tensor]:
    names = {id(p): name for name, p in session.module.named_parameters()}
    return {
        f"{names[id(p)]}.{key}": value.clone()
        for p, entries in session.optimizer.state.items()
        for key, value in entries.items()
    }


def save_on(rank: int, size: int, path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    session = session_of(rank, size, seed=0)
    for _, batch in zip(range(3), session.batches(points(60), global_batch=12), strict=False):
        session.step(batch)
    session.optimizer.param_groups[1]["lr"] = 0.125
    session.save(path)
    return session.state_dict(), moments(session)


def load_on(rank: int, size: int, path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Any]]:
    session = session_of(rank, size, seed=rank + 10)
    session.load(path)
    assert session.position == (0, 3)
    options = [(group["lr"], group["weight_decay"]) for group in session.optimizer.param_groups]
    state, optimizer = {k: v.clone() for k, v in session.state_dict().items()}, moments(session)
    session.step(next(session.batches(points(60), global_batch=12)))  # training continues
    return state, optimizer, options


def test_two_ranks_save_and_one_or_three_load(two: RankPool, three: RankPool, tmp_path: Path) -> None:
    state, optimizer = two.run(save_on, tmp_path / "saved")[0]
    for loaded in [load_on(0, 1, tmp_path / "saved"), *three.run(load_on, tmp_path / "saved")]:
        assert equal_states(loaded[0], state)
        assert equal_states(loaded[1], optimizer)
        assert loaded[2] == [(0.01, 0.01), (0.125, 0.0)]
    assert not any(name.startswith("never") for name in optimizer), (
        "a parameter that was never used has no optimizer state"
    )
    assert "again.weight.exp_avg_sq" in optimizer


def test_one_rank_saves_and_two_load(two: RankPool, tmp_path: Path) -> None:
    state, optimizer = save_on(0, 1, tmp_path / "saved")
    for loaded in two.run(load_on, tmp_path / "saved"):
        assert equal_states(loaded[0], state)
        assert equal_states(loaded[1], optimizer)


def test_options_and_moments_are_loaded_by_parameter_name(tmp_path: Path) -> None:
    """The groups of the optimizer that loads may divide the parameters differently."""
    _, optimizer = save_on(0, 1, tmp_path / "saved")
    torch.manual_seed(5)
    session = Session(
        TiedModel(),
        lambda parameters: torch.optim.AdamW(reversed(list(parameters.values())), lr=1.0),
        loss=F.cross_entropy,
        plan=Plan(),
        world=world(),
    )
    session.load(tmp_path / "saved")
    assert equal_states(moments(session), optimizer)


class WithExtraLayer(TiedModel):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)


class WithFewerLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 6)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (TiedModel(7), r"first\.weight is \(6, 20\) in the checkpoint, but \(7, 20\) in the model"),
        (WithExtraLayer(), r"the checkpoint has no extra\.weight, which the model has: it is of another model"),
        (WithFewerLayers(), r"the checkpoint holds again\.weight, which the model has not: it is of another model"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, model: nn.Module, message: str) -> None:
    save_on(0, 1, tmp_path / "saved")
    session = session_of(0, 1, seed=0, model=model)
    before = {name: value.clone() for name, value in session.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        session.load(tmp_path / "saved")
    assert equal_states(before, session.state_dict())


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    model = TiedModel()
    session = Session(
        model,
        lambda _: torch.optim.AdamW(model.head.parameters()),
        loss=F.cross_entropy,
        plan=Plan(),
        world=world(),
    )
    session.save(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"the checkpoint's optimizer does not hold first\.weight"):
        session_of(0, 1, seed=0).load(tmp_path / "saved")


class WithExtraState(nn.Linear):
    """A module with state that is not a tensor."""

    def __init__(self) -> None:
        super().__init__(20, 5)
        self.calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(input)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def test_extra_state_of_modules_is_saved_and_loaded(tmp_path: Path) -> None:
    session = session_of(0, 1, seed=0, model=nn.Sequential(OrderedDict(layer=WithExtraState())))
    session.step((torch.randn(4, 20), torch.tensor([0, 1, 2, 3])))
    session.save(tmp_path / "saved")
    again = session_of(0, 1, seed=0, model=nn.Sequential(OrderedDict(layer=WithExtraState())))
    again.load(tmp_path / "saved")
    layer = again.module.get_submodule("layer")
    assert isinstance(layer, WithExtraState)
    assert layer.calls == 1


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adamax])
def test_the_state_of_other_optimizers_is_saved_and_loaded(tmp_path: Path, kind: type[torch.optim.Optimizer]) -> None:
    def make_session() -> Session:
        return Session(
            nn.Linear(20, 5),
            lambda parameters: kind(parameters.values(), lr=0.1),  # type: ignore[call-arg]
            loss=F.cross_entropy,
            plan=Plan(),
            world=world(),
        )

    session, again = make_session(), make_session()
    for _, batch in zip(range(3), session.batches(points(40), global_batch=10), strict=False):
        session.step(batch)
    session.save(tmp_path / "saved")
    again.load(tmp_path / "saved")
    assert equal_states(moments(again), moments(session))
    batch = next(session.batches(points(40), global_batch=10))
    assert float(session.step(batch)) == float(again.step(batch))
    assert equal_states(again.state_dict(), session.state_dict())
