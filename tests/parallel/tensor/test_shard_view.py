"""What shard views report to the model's code, how dropout behaves on them, and what errors say to the user."""

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
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes, Modules, Split
from meshwright.profile.structure.structure import find_structure
from tests.parallel.tensor.models import NanoGPT, make, words
from tests.ranks import RankPool


def split_in_place(model: nn.Module, sample: Any, world_size: int, modules: Modules) -> list[str]:
    plan = Plan(axes=Axes(tensor=world_size), modules=modules)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor",))
    return sorted(split_modules([model], plan, find_structure(model, sample), mesh))


class RecordingMLP(nn.Module):
    """Keeps the activation that its code sees between two split layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 64), nn.Linear(64, 4)
        self.activation: Any = None

    def forward(self, x: Tensor) -> Tensor:
        wide = F.dropout(self.up(x).mul(0).add(1), 0.5)
        self.activation = wide
        out: Tensor = self.down(wide)
        return out


def run_with_dropout(rank: int, world_size: int) -> tuple[list[float], bytes, tuple[int, ...], tuple[int, ...]]:
    model = RecordingMLP()
    split_in_place(model, torch.zeros(2, 4), world_size, Modules())
    torch.manual_seed(5)
    model(torch.zeros(2, 4))
    activation = model.activation
    assert isinstance(activation, ShardView)
    state = torch.get_rng_state().numpy().tobytes()
    local = activation.local_tensor
    return local.flatten().tolist(), state, tuple(activation.shape), tuple(local.shape)


def test_views_report_the_full_shape_and_dropout_differs_by_rank_while_generators_stay_equal(two: RankPool) -> None:
    (values_0, state_0, shape, local_shape), (values_1, state_1, *_) = two.run(run_with_dropout)
    assert shape == (2, 64)
    assert local_shape == (2, 32)
    assert values_0 != values_1
    assert set(values_0) == set(values_1) == {0.0, 2.0}
    assert state_0 == state_1


def difference_with_recomputing(rank: int, world_size: int, sequence: bool) -> float:
    gradients = []
    for kind in ("none", "full"):
        torch.manual_seed(0)
        model = NanoGPT(0.3).double()
        tokens = words()
        split_in_place(model, (tokens, torch.zeros(3)), world_size, Modules(sequence=sequence))
        recompute_blocks(model, kind)
        torch.manual_seed(1)
        model(tokens).sin().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return max(float((gradients[0][name] - gradients[1][name]).abs().max()) for name in gradients[0])


@pytest.mark.soak
@pytest.mark.parametrize("sequence", [False, True])
def test_dropout_is_the_same_when_a_block_is_recomputed(two: RankPool, sequence: bool) -> None:
    assert max(two.run(difference_with_recomputing, sequence)) < 1e-12


def run_under_autocast(rank: int, world_size: int, sequence: bool) -> tuple[float, bool]:
    torch.manual_seed(0)
    model, parallel, tokens = NanoGPT(), NanoGPT(), words()
    parallel.load_state_dict(model.state_dict())
    split_in_place(parallel, (tokens, torch.zeros(3)), world_size, Modules(sequence=sequence))
    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = model(tokens), parallel(tokens)
    actual.float().sum().backward()
    return float((actual - expected).abs().max() / expected.abs().max()), actual.dtype == expected.dtype


@pytest.mark.parametrize("sequence", [False, True])
def test_under_autocast(two: RankPool, sequence: bool) -> None:
    for error, same_dtype in two.run(run_under_autocast, sequence):
        assert error < 0.03
        assert same_dtype


class SortingMLP(nn.Module):
    """Its authors declare that it can be split (`_tp_plan`), but it needs all features at once."""

    _tp_plan = {"up": "colwise", "down": "rowwise"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).sort(dim=-1).values)
        return out


def error_message(rank: int, world_size: int, name: str, splits: dict[str, Any], tensor: int) -> str:
    model: nn.Module = SortingMLP() if name == "sorts" else make(name)[0]
    sample: Any = torch.zeros(2, 4) if name == "sorts" else (words(), torch.zeros(3))
    plan = Plan(axes=Axes(tensor=tensor), modules=Modules(splits={k: Split(**v) for k, v in splits.items()}))
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor",))
    try:
        split_modules([model], plan, find_structure(model, sample), mesh)
        model(sample if name == "sorts" else sample[0])
    except InputError as error:
        return str(error)
    return ""


def test_a_function_that_cannot_be_split_is_named_with_the_remedy(two: RankPool) -> None:
    (message, _) = two.run(error_message, "sorts", {}, 2)
    assert "sort" in message
    assert "kind: none" in message
    assert two.run(error_message, "sorts", {"up": {"kind": "none"}}, 2) == ["", ""]


def test_heads_that_the_ranks_do_not_divide_are_refused(two: RankPool) -> None:
    (message, _) = two.run(error_message, "llama", {}, 4)
    assert "4 heads and 2 key-value heads: choose 1, 2" in message


def test_an_unknown_module_name_is_refused(two: RankPool) -> None:
    (message, _) = two.run(error_message, "nano", {"h.*.atn": {"kind": "none"}}, 2)
    assert "h.*.atn" in message
    assert "did you mean" in message


def split_by_plan(rank: int, world_size: int, splits: dict[str, Any]) -> tuple[list[str], float]:
    model, args, _ = make("mlp")
    parallel, _, _ = make("mlp")
    modules = Modules(splits={k: Split(**v) for k, v in splits.items()})
    names = split_in_place(parallel, args[0], world_size, modules)
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
def test_splits_of_the_plan_override_the_structure(two: RankPool, splits: dict[str, Any], names: list[str]) -> None:
    for split_names, error in two.run(split_by_plan, splits):
        assert split_names == names
        assert error < 1e-12


def split_on_meta_device(rank: int, world_size: int) -> tuple[int, ...]:
    with torch.device("meta"):
        model = NanoGPT()
    split_in_place(model, (words(), torch.zeros(3)), world_size, Modules())
    assert model.lm_head.weight is model.wte.weight
    return tuple(model.wte.weight.shape)


def test_parameters_on_the_meta_device_are_split_and_stay_tied(two: RankPool) -> None:
    assert two.run(split_on_meta_device) == [(19, 16), (18, 16)]
