"""A model built on the meta device and filled shard by shard has bitwise the weights of one that was built whole."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.init import orthogonal_

from meshwright.errors import InputError
from meshwright.parallel.mesh import build_mesh
from meshwright.parallel.shard import gradient_synchronization, shard
from meshwright.parallel.weights.deferred import build_on_meta, find_unreproducible, materialize
from meshwright.parallel.weights.initialize import initialize_model
from meshwright.parallel.weights.layout import ParameterLayout, shard_layout
from meshwright.parallel.weights.state import full_state
from meshwright.plan import Plan
from tests.parallel.weights.test_initialize import ManyLayers
from tests.ranks import RankPool
from tests.train.one_process import equal_states


class UnusualParameters(nn.Module):
    """Has more than plain layers: constants, computed buffers, partly random tensors, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)).view(1, 1, 4, 4))
        self.register_buffer("speeds", 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8)), persistent=False)
        self.first = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.first.weight
        rows = torch.ones(4, 4)
        rows[:2].normal_()
        self.partly = nn.Parameter(rows.mul_(2))
        self.constant = nn.Parameter(torch.tensor([1.0, 2.5]))
        self.scale = nn.Parameter(1e-3 * torch.ones(5))
        self.cut = nn.Parameter(nn.init.trunc_normal_(torch.empty(30, 30)))
        self.turn = nn.Parameter(nn.init.orthogonal_(torch.empty(5, 3)))
        self.few = nn.Parameter(nn.init.sparse_(torch.empty(5, 3), 0.5))
        self.spike = nn.Parameter(nn.init.dirac_(torch.rand(3, 3, 3)))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


@pytest.mark.parametrize("build", [lambda: ManyLayers("abcdefgh"), UnusualParameters], ids=["layers", "unusual"])
def test_weights_are_bitwise_those_of_the_whole_model(build: Callable[[], nn.Module]) -> None:
    expected = initialize_model(build, 3)
    torch.manual_seed(7)
    model, recording = build_on_meta(build, 3)
    assert all(p.is_meta or p.numel() < 3 for p in model.parameters())
    assert not find_unreproducible(model, recording)
    materialize(model, recording, {}, 3, torch.device("cpu"))
    drawn = torch.rand(2)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(2)), "the caller's random generator is not changed"
    assert equal_states(model.state_dict(), expected.state_dict())
    for (name, ours), (_, theirs) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert ours.requires_grad == theirs.requires_grad, name
    for (_, buffer), (_, other) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(buffer, other)


def test_truncated_and_orthogonal_weights_depend_on_their_names_only() -> None:
    """They are truncated or orthogonal, whatever was drawn before them."""
    model = initialize_model(
        lambda: nn.ModuleDict({"more": nn.Linear(3, 3), "unusual": UnusualParameters()}), 3
    ).get_submodule("unusual")
    again = initialize_model(
        lambda: nn.ModuleDict({"unusual": UnusualParameters(), "more": nn.Linear(3, 3)}), 3
    ).get_submodule("unusual")
    for name in ("cut", "turn", "few"):
        assert torch.equal(model.get_parameter(name), again.get_parameter(name))
    assert float(model.get_parameter("cut").detach().abs().max()) <= 2
    turn = model.get_parameter("turn").detach()
    torch.testing.assert_close(turn.T @ turn, torch.eye(3))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 6)) for _ in range(2)])
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 6)
        self.head.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(6, 6)))
        self.tail = nn.Linear(6, 6, bias=False)
        self.tail.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.tail(self.head(self.norm(x)))
        return out


def divided(rank: int, size: int) -> tuple[dict[str, Tensor], bool, bool]:
    """Divides the model over shard 2 × tensor 2 while it is on the meta device, then fills it."""
    plan = Plan.model_validate({"axes": {"shard": 2, "tensor": 2}})
    mesh = build_mesh(plan, "cpu", size)
    assert mesh is not None
    model, recording = build_on_meta(Net, 3)
    layouts: dict[str, ParameterLayout] = {}
    for block in range(2):
        for name, dim in (("0.weight", 0), ("0.bias", 0), ("1.weight", 1)):
            owner = model.get_submodule(f"blocks.{block}.{name[0]}")
            whole = owner.get_parameter(name[2:])
            layout = shard_layout(whole.shape, dim, (), "tensor", 2, mesh.get_local_rank("tensor"))
            rows = list(whole.shape)
            rows[dim] = sum(length for _, length in layout.ranges)
            setattr(owner, name[2:], nn.Parameter(torch.empty(rows, device="meta")))
            layouts[f"blocks.{block}.{name}"] = layout
    shard(model, mesh, plan)
    assert all(p.is_meta for p in model.parameters())
    materialize(model, recording, layouts, 3, torch.device("cpu"))
    all_are_real = all(isinstance(p, DTensor) and not p.is_meta for p in model.parameters())
    state = full_state(model, layouts, mesh)
    return (
        state,
        all_are_real,
        model.get_parameter("head.weight") is model.get_submodule("tail").get_parameter("weight"),
    )


def trained(rank: int, size: int) -> dict[str, Tensor]:
    plan = Plan.model_validate({"axes": {"shard": size}})
    mesh = build_mesh(plan, "cpu", size)
    assert mesh is not None
    model, recording = build_on_meta(Net, 3)
    shard(model, mesh, plan)
    materialize(model, recording, {}, 3, torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradient_synchronization(model, plan, True, True):
        model(torch.arange(12.0).view(2, 6)).square().mean().backward()
    optimizer.step()
    return full_state(model, {}, mesh)


def test_divided_models_are_filled_shard_by_shard(four: RankPool) -> None:
    expected = initialize_model(Net, 3)
    for state, all_are_real, tied in four.run(divided):
        assert all_are_real
        assert tied
        assert equal_states(state, expected.state_dict())


def test_models_filled_shard_by_shard_train_as_whole_ones(four: RankPool) -> None:
    model = initialize_model(Net, 3)
    model(torch.arange(12.0).view(2, 6)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for state in four.run(trained):
        torch.testing.assert_close(state, dict(model.state_dict()))


class Computed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.Parameter(torch.randn(3) * 0.02)
        self.later = nn.Linear(3, 3).double()
        self.never = nn.Parameter(torch.empty(3))
        self.bare = torch.arange(3)
        self.not_intercepted = nn.Linear(3, 3)
        orthogonal_(self.not_intercepted.weight)


def test_tensors_that_cannot_be_filled_shard_by_shard_are_named_with_the_reason() -> None:
    model, recording = build_on_meta(Computed, 0)
    reasons = find_unreproducible(model, recording)
    computed = "it is computed from another random tensor: fill it in place (torch.nn.init)"
    assert reasons["scaled"] == computed
    assert reasons["later.weight"] == computed
    assert reasons["never"] == "nothing fills it: give it a value"
    assert reasons["bare"] == "it is a plain attribute: register it as a buffer"
    assert "not_intercepted.weight" in reasons
    with pytest.raises(
        InputError, match=r"scaled \(and \d more\) cannot be initialized shard by shard: it is computed"
    ):
        materialize(model, recording, {}, 0, torch.device("cpu"))


def test_a_model_whose_code_reads_its_weights_is_refused() -> None:
    with pytest.raises(InputError, match="since its code reads values"):
        build_on_meta(lambda: nn.Linear(2, int(nn.Linear(2, 2).weight.abs().sum()) + 1), 0)
