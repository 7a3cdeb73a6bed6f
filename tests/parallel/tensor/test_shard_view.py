"""What parts tell the model's code, what they do where chance is involved, and what a user is told."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from meshwright.blocks.recompute import recompute_blocks
from meshwright.errors import InputError
from meshwright.parallel.tensor.shard_view import ShardView
from meshwright.parallel.tensor.split_modules import split_modules
from meshwright.plan import Axes, Modules, Plan, Split
from meshwright.profile.structure.structure import structure
from tests.parallel.tensor.models import NanoGPT, make, words
from tests.ranks import RankPool


def divide(model: nn.Module, sample: Any, world_size: int, modules: Modules) -> list[str]:
    plan = Plan(axes=Axes(tensor=world_size), modules=modules)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor",))
    return sorted(split_modules([model], plan, structure(model, sample), mesh))


class Watched(nn.Module):
    """Keeps what its code sees between two split layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 64), nn.Linear(64, 4)
        self.seen: Any = None

    def forward(self, x: Tensor) -> Tensor:
        wide = F.dropout(self.up(x).mul(0).add(1), 0.5)
        self.seen = wide
        out: Tensor = self.down(wide)
        return out


def chance(rank: int, world_size: int) -> tuple[list[float], bytes, tuple[int, ...], tuple[int, ...]]:
    model = Watched()
    divide(model, torch.zeros(2, 4), world_size, Modules())
    torch.manual_seed(5)
    model(torch.zeros(2, 4))
    seen = model.seen
    assert isinstance(seen, ShardView)
    state = torch.get_rng_state().numpy().tobytes()
    return seen.local.flatten().tolist(), state, tuple(seen.shape), tuple(seen.local.shape)


def test_parts_look_whole_and_drop_differently_while_generators_stay_in_step(two: RankPool) -> None:
    (left, here, shape, local), (right, there, *_) = two.run(chance)
    assert shape == (2, 64)
    assert local == (2, 32)
    assert left != right
    assert set(left) == set(right) == {0.0, 2.0}
    assert here == there


def again(rank: int, world_size: int, sequence: bool) -> float:
    found = []
    for kind in ("none", "full"):
        torch.manual_seed(0)
        model = NanoGPT(0.3).double()
        tokens = words()
        divide(model, (tokens, torch.zeros(3)), world_size, Modules(sequence=sequence))
        recompute_blocks(model, kind)
        torch.manual_seed(1)
        model(tokens).sin().sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return max(float((found[0][name] - found[1][name]).abs().max()) for name in found[0])


@pytest.mark.soak
@pytest.mark.parametrize("sequence", [False, True])
def test_dropout_falls_alike_when_a_block_is_computed_again(two: RankPool, sequence: bool) -> None:
    assert max(two.run(again, sequence)) < 1e-12


def lowered(rank: int, world_size: int, sequence: bool) -> tuple[float, bool]:
    torch.manual_seed(0)
    model, parallel, tokens = NanoGPT(), NanoGPT(), words()
    parallel.load_state_dict(model.state_dict())
    divide(parallel, (tokens, torch.zeros(3)), world_size, Modules(sequence=sequence))
    with torch.autocast("cpu", torch.bfloat16):
        right, found = model(tokens), parallel(tokens)
    found.float().sum().backward()
    return float((found - right).abs().max() / right.abs().max()), found.dtype == right.dtype


@pytest.mark.parametrize("sequence", [False, True])
def test_under_autocast(two: RankPool, sequence: bool) -> None:
    for far, same in two.run(lowered, sequence):
        assert far < 0.03
        assert same


class Sorts(nn.Module):
    """Its authors say that it can be split, but it needs all features."""

    _tp_plan = {"up": "colwise", "down": "rowwise"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).sort(dim=-1).values)
        return out


def told(rank: int, world_size: int, name: str, splits: dict[str, Any], tensor: int) -> str:
    model: nn.Module = Sorts() if name == "sorts" else make(name)[0]
    sample: Any = torch.zeros(2, 4) if name == "sorts" else (words(), torch.zeros(3))
    plan = Plan(axes=Axes(tensor=tensor), modules=Modules(splits={k: Split(**v) for k, v in splits.items()}))
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor",))
    try:
        split_modules([model], plan, structure(model, sample), mesh)
        model(sample if name == "sorts" else sample[0])
    except InputError as error:
        return str(error)
    return ""


def test_a_function_without_a_rule_is_named_with_the_way_out(two: RankPool) -> None:
    (text, _) = two.run(told, "sorts", {}, 2)
    assert "sort" in text
    assert "kind: none" in text
    assert two.run(told, "sorts", {"up": {"kind": "none"}}, 2) == ["", ""]


def test_heads_that_the_ranks_do_not_divide(two: RankPool) -> None:
    (text, _) = two.run(told, "llama", {}, 4)
    assert "4 heads and 2 key-value heads: choose 1, 2" in text


def test_a_name_that_is_no_modules(two: RankPool) -> None:
    (text, _) = two.run(told, "nano", {"h.*.atn": {"kind": "none"}}, 2)
    assert "h.*.atn" in text
    assert "did you mean" in text


def overridden(rank: int, world_size: int, splits: dict[str, Any]) -> tuple[list[str], float]:
    model, args, _ = make("mlp")
    parallel, _, _ = make("mlp")
    chosen = Modules(splits={k: Split(**v) for k, v in splits.items()})
    names = divide(parallel, args[0], world_size, chosen)
    return names, float((parallel(*args) - model(*args)).abs().max().detach())


@pytest.mark.parametrize(
    ("splits", "names"),
    [
        ({"0": {"kind": "none"}}, []),
        ({"0": {"kind": "column"}}, ["0.bias", "0.weight"]),
        ({"2": {"kind": "row"}}, ["2.weight"]),
        ({"*": {"kind": "column"}}, ["0.bias", "0.weight", "2.bias", "2.weight"]),
    ],
)
def test_what_the_plan_says_goes_before_the_structure(two: RankPool, splits: dict[str, Any], names: list[str]) -> None:
    for found, far in two.run(overridden, splits):
        assert found == names
        assert far < 1e-12


def on_meta(rank: int, world_size: int) -> tuple[int, ...]:
    with torch.device("meta"):
        model = NanoGPT()
    divide(model, (words(), torch.zeros(3)), world_size, Modules())
    assert model.lm_head.weight is model.wte.weight
    return tuple(model.wte.weight.shape)


def test_on_the_meta_device_shapes_change_and_ties_stay(two: RankPool) -> None:
    assert two.run(on_meta) == [(19, 16), (18, 16)]
