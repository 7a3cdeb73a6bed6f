"""A model built without memory and filled part by part has bitwise the weights of one that was built whole."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.init import orthogonal_

from meshwright.errors import InputError
from meshwright.parallel.mesh import build_mesh
from meshwright.parallel.shard import combining, shard
from meshwright.parallel.weights.deferred import materialize, problems, recorded
from meshwright.parallel.weights.initialize import initialized
from meshwright.parallel.weights.layout import Layout, lay_out
from meshwright.parallel.weights.state import full_state
from meshwright.plan import Plan
from tests.parallel.weights.test_initialize import Parts
from tests.ranks import RankPool
from tests.train.alone import equal_states


class Odd(nn.Module):
    """What models do besides plain layers: constants, computed buffers, parts that are drawn, tied weights."""

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


@pytest.mark.parametrize("make", [lambda: Parts("abcdefgh"), Odd], ids=["layers", "odd"])
def test_weights_are_bitwise_those_of_the_whole_model(make: Callable[[], nn.Module]) -> None:
    expected = initialized(make, 3)
    torch.manual_seed(7)
    model, recording = recorded(make, 3)
    assert all(p.is_meta or p.numel() < 3 for p in model.parameters())
    assert not problems(model, recording)
    materialize(model, recording, {}, 3, torch.device("cpu"))
    drawn = torch.rand(2)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(2)), "the caller's randomness stays"
    assert equal_states(model.state_dict(), expected.state_dict())
    for (name, ours), (_, theirs) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert ours.requires_grad == theirs.requires_grad, name
    for (_, buffer), (_, other) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(buffer, other)


def test_truncated_and_orthogonal_weights_follow_their_names() -> None:
    """And are what they are said to be, whatever was drawn before them."""
    model = initialized(lambda: nn.ModuleDict({"more": nn.Linear(3, 3), "odd": Odd()}), 3).get_submodule("odd")
    again = initialized(lambda: nn.ModuleDict({"odd": Odd(), "more": nn.Linear(3, 3)}), 3).get_submodule("odd")
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
    """Shard 2 × tensor 2, all of it on the meta device."""
    plan = Plan.model_validate({"axes": {"shard": 2, "tensor": 2}})
    mesh = build_mesh(plan, "cpu", size)
    assert mesh is not None
    model, recording = recorded(Net, 3)
    layouts: dict[str, Layout] = {}
    for block in range(2):
        for name, dim in (("0.weight", 0), ("0.bias", 0), ("1.weight", 1)):
            owner = model.get_submodule(f"blocks.{block}.{name[0]}")
            whole = owner.get_parameter(name[2:])
            layout = lay_out(whole.shape, dim, (), "tensor", 2, mesh.get_local_rank("tensor"))
            rows = list(whole.shape)
            rows[dim] = sum(length for _, length in layout.stretches)
            setattr(owner, name[2:], nn.Parameter(torch.empty(rows, device="meta")))
            layouts[f"blocks.{block}.{name}"] = layout
    shard(model, mesh, plan)
    assert all(p.is_meta for p in model.parameters())
    materialize(model, recording, layouts, 3, torch.device("cpu"))
    held = all(isinstance(p, DTensor) and not p.is_meta for p in model.parameters())
    state = full_state(model, layouts, mesh)
    return state, held, model.get_parameter("head.weight") is model.get_submodule("tail").get_parameter("weight")


def trained(rank: int, size: int) -> dict[str, Tensor]:
    plan = Plan.model_validate({"axes": {"shard": size}})
    mesh = build_mesh(plan, "cpu", size)
    assert mesh is not None
    model, recording = recorded(Net, 3)
    shard(model, mesh, plan)
    materialize(model, recording, {}, 3, torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with combining(model, plan, True, True):
        model(torch.arange(12.0).view(2, 6)).square().mean().backward()
    optimizer.step()
    return full_state(model, {}, mesh)


def test_divided_models_are_filled_part_by_part(four: RankPool) -> None:
    expected = initialized(Net, 3)
    for state, held, tied in four.run(divided):
        assert held
        assert tied
        assert equal_states(state, expected.state_dict())


def test_filled_models_train(four: RankPool) -> None:
    model = initialized(Net, 3)
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
        self.unseen = nn.Linear(3, 3)
        orthogonal_(self.unseen.weight)


def test_what_cannot_be_filled_part_by_part_is_named() -> None:
    model, recording = recorded(Computed, 0)
    found = problems(model, recording)
    computed = "it is computed from another random tensor: fill it in place (torch.nn.init)"
    assert found["scaled"] == computed
    assert found["later.weight"] == computed
    assert found["never"] == "nothing fills it: give it a value"
    assert found["bare"] == "it is a plain attribute: register it as a buffer"
    assert "unseen.weight" in found
    with pytest.raises(InputError, match=r"scaled \(and \d more\) cannot be initialized part by part: it is computed"):
        materialize(model, recording, {}, 0, torch.device("cpu"))


def test_a_model_that_looks_at_its_weights_while_it_is_built_is_refused() -> None:
    with pytest.raises(InputError, match="since its code reads values"):
        recorded(lambda: nn.Linear(2, int(nn.Linear(2, 2).weight.abs().sum()) + 1), 0)
