"""A checkpoint written under any plan holds whole tensors by name, and loads under any other plan."""

import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.checkpoint.load import load
from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.reader import CheckpointReader, open_checkpoint
from meshwright.checkpoint.save import save_at
from meshwright.checkpoint.state import model_state, optimizer_state
from meshwright.errors import CheckpointError, InputError
from meshwright.parallel.weights.state import full_state
from tests.parallel.hand_sharded import AXES, ShardedModel, shard_by_hand, whole_model
from tests.ranks import RankPool
from tests.soaked import all_but

ONE: dict[str, int] = {}
TWO: list[dict[str, int]] = [{"shard": 2}, {"tensor": 2}, {"pipeline": 2}]


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """With two groups, of which one may have no parameters on some pipeline stages."""
    norms = [p for name, p in module.named_parameters() if name.startswith("norm")]
    without_norms = [p for name, p in module.named_parameters() if not name.startswith("norm")]
    groups: list[dict[str, Any]] = [{"params": without_norms}, {"params": norms, "weight_decay": 0.5}]
    return torch.optim.AdamW(groups, lr=0.1)


def opened(path: Path) -> AbstractContextManager[CheckpointReader]:
    return open_checkpoint(path, read_manifest(path))


def state_of(parts: ShardedModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        **model_state(parts.module, parts.layouts),
        **optimizer_state(parts.module, optimizer, parts.layouts, parts.tied, parts.mesh),
        "schedule": {"last_epoch": 3},
    }


def save_under(rank: int, size: int, axes: dict[str, int], path: Path) -> None:
    parts = shard_by_hand(axes, size)
    optimizer = optimizer_of(parts.module)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.05
    save_at(state_of(parts, optimizer), path, 1, {"step": 1, "position": [0, 1], "seed": 0})


def load_under(rank: int, size: int, axes: dict[str, int], path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights as loaded, and those of one more step with the gradients of `whole_model(1)`."""
    parts = shard_by_hand(axes, size, seed=1)
    optimizer = optimizer_of(parts.module)
    objects = load(path, read_manifest(path), parts.module, optimizer, parts.layouts, parts.tied, parts.mesh)
    assert objects["schedule"] == {"last_epoch": 3}
    order = list(whole_model().state_dict())
    loaded = full_state(parts.module, parts.layouts, parts.mesh, order=order)
    optimizer.step()
    return loaded, full_state(parts.module, parts.layouts, parts.mesh, order=order)


def expected() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, other = whole_model(), whole_model(1)
    optimizer = optimizer_of(model)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.05
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        parameter.grad = other.get_parameter(name).grad
    optimizer.step()
    return saved, dict(model.state_dict())


def assert_as_expected(states: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
    for state, expected_state in zip(states, expected(), strict=True):
        assert list(state) == list(expected_state)
        for name, value in expected_state.items():
            torch.testing.assert_close(state[name], value, rtol=1e-14, atol=0, msg=name)


@pytest.mark.parametrize("axes", all_but(AXES[::4], AXES), ids=str)
def test_saved_on_one_rank_it_loads_under_every_plan(four: RankPool, axes: dict[str, int], tmp_path: Path) -> None:
    save_under(0, 1, ONE, tmp_path / "saved")
    for states in four.run(load_under, axes, tmp_path / "saved"):
        assert_as_expected(states)


@pytest.mark.parametrize("axes", all_but(AXES[::4], AXES), ids=str)
def test_saved_under_every_plan_it_loads_on_one_rank_and_under_others(
    four: RankPool, two: RankPool, axes: dict[str, int], tmp_path: Path
) -> None:
    four.run(save_under, axes, tmp_path / "saved")
    assert_as_expected(load_under(0, 1, ONE, tmp_path / "saved"))
    other_axes = TWO[AXES.index(axes) % len(TWO)]
    for states in two.run(load_under, other_axes, tmp_path / "saved"):
        assert_as_expected(states)


@pytest.mark.parametrize("axes", all_but(AXES[::4], AXES), ids=str)
def test_every_element_is_written_once(four: RankPool, axes: dict[str, int], tmp_path: Path) -> None:
    four.run(save_under, axes, tmp_path / "saved")
    save_under(0, 1, ONE, tmp_path / "one_process")
    with opened(tmp_path / "saved") as divided, opened(tmp_path / "one_process") as whole:
        assert divided.objects.keys() == whole.objects.keys()
        assert divided.tensors.keys() == whole.tensors.keys()
        for key, tensor in whole.tensors.items():
            assert (divided.tensors[key].shape, divided.tensors[key].dtype) == (tensor.shape, tensor.dtype), key
            written = sum(math.prod(piece.sizes) for piece in divided.tensors[key].pieces)
            assert written == math.prod(tensor.shape), key
        needed_bytes = sum(t.bytes_of(piece) for t in divided.tensors.values() for piece in t.pieces)
    padding = 64 * sum(len(tensor.pieces) for tensor in divided.tensors.values())
    written_bytes = sum(path.stat().st_size for path in (tmp_path / "saved").glob("*.bin"))
    assert needed_bytes <= written_bytes <= needed_bytes + padding


def load_changed_model(rank: int, size: int, axes: dict[str, int], path: Path, change: str) -> str:
    parts = shard_by_hand(axes, size)
    if change == "shape" and hasattr(parts.module, "norm"):
        parts.module.norm = nn.BatchNorm1d(7)
    if change == "more" and hasattr(parts.module, "norm"):
        parts.module.extra = nn.Linear(2, 2)
    if change == "fewer" and hasattr(parts.module, "norm"):
        del parts.module.norm
    try:
        load(path, read_manifest(path), parts.module, None, parts.layouts, parts.tied, parts.mesh)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("none", ""),
        ("shape", "norm.weight is (5,) in the checkpoint, but (7,) in the model"),
        ("more", "the checkpoint has no extra.weight, which the model has: it is of another model"),
        ("fewer", "the checkpoint holds norm.bias, which the model has not: it is of another model"),
    ],
)
def test_every_rank_raises_the_same_error_where_the_checkpoint_differs(
    four: RankPool, tmp_path: Path, change: str, message: str
) -> None:
    save_under(0, 1, ONE, tmp_path / "saved")
    assert four.run(load_changed_model, {"pipeline": 2, "tensor": 2}, tmp_path / "saved", change) == [message] * 4


def save_factored_optimizer(rank: int, size: int) -> str:
    parts = shard_by_hand({"tensor": 2}, size)
    optimizer = torch.optim.Adafactor(parts.module.parameters())
    optimizer.step()
    try:
        state_of(parts, optimizer)
    except InputError as error:
        return str(error)
    return ""


def test_optimizer_entries_of_another_shape_are_refused_where_parameters_are_divided(two: RankPool) -> None:
    message = two.run(save_factored_optimizer)[0]
    assert message.startswith("Adafactor: its ")
    assert "the plan's axis tensor divides this parameter among ranks, so that only tensors of its own shape" in message
