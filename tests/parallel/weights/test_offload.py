"""An optimizer whose state is in CPU memory trains as it does without, and its state is saved and loaded alike. Here
parameters are in CPU memory, too; those of tests/train/step/test_offload_cuda.py are on a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.parallel.weights.offload import host_copies, step_on_host
from meshwright.plan import Plan
from meshwright.plan_rules.table import check_rules
from meshwright.train.session import Session
from tests.ranks import RankPool
from tests.train.one_process import equal_states, world

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    (torch.optim.Adafactor, {"lr": 0.01}),
]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def bias_of(model: nn.Sequential, layer: int) -> nn.Parameter:
    bias = model[layer].bias
    assert isinstance(bias, nn.Parameter)
    return bias


def gradients_of(model: nn.Module, step: int) -> None:
    model(torch.full((4, 6), 0.3 * step + 0.1)).square().sum().backward()


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_steps_on_copies_are_those_on_the_parameters(kind: Any, options: dict[str, Any]) -> None:
    states = []
    for offloads in (False, True):
        model = net()
        optimizer = kind(model.parameters(), **options)
        if offloads:
            step_on_host(optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for step in range(3):
            optimizer.zero_grad()
            gradients_of(model, step)
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                bias_of(model, 0).data.mul_(0.9)  # what changes weights between steps is not undone by the next step
        states.append((model.state_dict(), optimizer.state_dict()))
    assert equal_states(states[0][0], states[1][0])
    assert str(states[0][1]) == str(states[1][1])


def test_hooks_and_callers_see_the_parameters_of_the_model() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step_on_host(optimizer)
    seen: list[bool] = []

    def look(*_: Any) -> None:
        seen.append(optimizer.param_groups[0]["params"] == list(model.parameters()))

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    bias_of(model, 2).requires_grad_(False)  # without a gradient, it is not updated
    before = bias_of(model, 2).clone()
    gradients_of(model, 1)
    optimizer.step()
    assert seen == [True, True]
    assert torch.equal(bias_of(model, 2), before)
    with pytest.raises(InputError, match=r"SGD\.step was called with a closure.* set it to none"):
        optimizer.step(lambda: 0.0)


def test_a_step_that_fails_leaves_model_and_optimizer_as_they_were() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step_on_host(optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients_of(model, 1)
    optimizer.param_groups[0]["lr"] = "high"
    with pytest.raises(TypeError):
        optimizer.step()
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    assert equal_states(model.state_dict(), before)


def test_sparse_gradients_are_copied() -> None:
    weights = []
    for offloads in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(10, 4, sparse=True)
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
        if offloads:
            step_on_host(optimizer)
        for rows in ([1, 2, 2], [5]):
            optimizer.zero_grad()
            table(torch.tensor(rows)).square().sum().backward()
            optimizer.step()
        weights.append(table.weight.detach().clone())
    assert torch.equal(*weights)


# ---- sessions


def session_of(rank: int, size: int, axis: str, offload: str, copies: bool) -> Session:
    """A session of a rank; with `copies`, its optimizer steps on copies although the rank is on the CPU."""
    session = Session(
        net(),
        lambda parameters: torch.optim.AdamW(parameters.values(), lr=0.01),
        loss=F.cross_entropy,
        plan=Plan.model_validate({"axes": {axis: size}, "memory": {"offload": offload}}),
        world=world(rank, size),
        clip_norm=1.0,
    )
    if copies:
        step_on_host(session.optimizer)
    return session


def train(session: Session, rank: int, steps: range) -> dict[str, Tensor]:
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + rank)
        inputs = torch.randn(4, 6, generator=generator)
        session.step((inputs, torch.randint(0, 3, (4,), generator=generator)))
    return session.state_dict()


def train_and_save(
    rank: int, size: int, axis: str, offload: str, copies: bool, folder: Path, resumes: bool
) -> dict[str, Tensor]:
    """Trains four steps. With `resumes`, the session after two of them begins with the checkpoint of the other."""
    session = session_of(rank, size, axis, offload, copies)
    if resumes:
        session.load(folder)
        if copies:
            state = next(iter(session.optimizer.state.values()))
            assert state["exp_avg"].device.type == "cpu"
            assert host_copies(session.optimizer) is not None
    else:
        train(session, rank, range(2))
        session.save(folder)
    return train(session, rank, range(2, 4))


@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_ranks_train_and_load_each_others_checkpoints(two: RankPool, tmp_path: Path, axis: str) -> None:
    plain, offloaded = tmp_path / "plain", tmp_path / "offloaded"
    expected = two.run(train_and_save, axis, "none", False, plain, False)
    for run in (
        two.run(train_and_save, axis, "optimizer", True, offloaded, False),
        two.run(train_and_save, axis, "optimizer", True, plain, True),
        two.run(train_and_save, axis, "none", False, offloaded, True),
        two.run(train_and_save, axis, "optimizer", False, offloaded, True),  # nothing to offload on CPU ranks
    ):
        assert all(equal_states(state, expected[0]) for state in run)


def test_shards_on_cpu_ranks_need_no_offload(two: RankPool, tmp_path: Path) -> None:
    expected = two.run(train_and_save, "shard", "none", False, tmp_path / "plain", False)
    offloaded = two.run(train_and_save, "shard", "parameters", False, tmp_path / "offloaded", False)
    assert all(equal_states(state, expected[0]) for state in offloaded)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"memory": {"offload": "parameters"}}, r"needs axes\.shard > 1 .* but axes\.shard is 1"),
        (
            {"axes": {"shard": 2}, "memory": {"offload": "parameters", "sharding": "gradients"}},
            r"memory\.sharding is gradients: change these, or set memory\.offload to optimizer",
        ),
        (
            {"memory": {"offload": "optimizer"}, "compute": {"cuda_graphs": True}},
            r"compute\.cuda_graphs is true, .* set one of them to its default",
        ),
        (
            {"memory": {"offload": "optimizer"}, "gradients": {"servers": 1}},
            r"gradients\.servers is 1, .* set memory\.offload to none",
        ),
    ],
)
def test_a_plan_that_cannot_offload_is_refused(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_rules(Plan.model_validate(plan))
