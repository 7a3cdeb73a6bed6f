"""A checkpoint without frozen weights is small, loads under every plan, and is refused if the frozen weights differ."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.checkpoint.contents import check_contents
from meshwright.checkpoint.frozen import FROZEN, region_digest, without_frozen
from meshwright.checkpoint.load import load
from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.reader import open_checkpoint
from meshwright.checkpoint.save import save_at
from meshwright.checkpoint.state import GROUPS, model_state, optimizer_state
from meshwright.cluster.detect import find_cluster
from meshwright.errors import CheckpointError, InputError
from meshwright.export.export import export
from meshwright.export.run import read_run
from meshwright.parallel.weights.state import full_state
from meshwright.plan import Plan
from meshwright.train.check import check_job
from meshwright.train.trainer import Trainer
from tests.export.runs import train_run
from tests.parallel.hand_sharded import AXES, ShardedModel, shard_by_hand, whole_model
from tests.ranks import RankFailure, RankPool
from tests.soaked import all_but
from tests.train.one_process import equal_states, make_trainer, session_of, toy_job, train

FREEZE = {"epochs": 2, "global_batch": 10, "seed": 3, "freeze": ["layers.0", "layers.3"]}
WITHOUT_FROZEN = {"every_steps": None, "frozen": False}


def tensors_of(path: Path) -> set[str]:
    with open_checkpoint(path, read_manifest(path)) as reader:
        return set(reader.tensors)


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


# ---- digests


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_the_digest_is_the_sum_over_regions(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randint(-100, 100, (5, 4, 3)).to(dtype)
    expected = region_digest(whole, (0, 0, 0), whole.shape)
    monkeypatch.setattr("meshwright.checkpoint.frozen._ELEMENTS_AT_ONCE", 13)  # one row at a time
    assert region_digest(whole, (0, 0, 0), whole.shape) == expected
    for dim in range(3):
        rest = whole.shape[dim] - 2
        parts = [whole.narrow(dim, 0, 2), whole.narrow(dim, 2, rest)]
        offsets = [[0, 0, 0], [2 if d == dim else 0 for d in range(3)]]
        digests = [region_digest(part, begin, whole.shape) for part, begin in zip(parts, offsets, strict=True)]
        assert sum(digests) % 2**64 == expected


def test_the_digest_depends_on_values_and_their_places() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    changed = whole.clone()
    changed[1, 2] = torch.nextafter(changed[1, 2], torch.tensor(9.0))
    digests = [region_digest(value, (0, 0), (3, 4)) for value in (whole, changed, whole.flip(0), whole + 0.0)]
    assert len(set(digests)) == 3
    assert digests[0] == digests[3]
    scalars = [region_digest(torch.tensor(value), (), ()) for value in (1.0, 2.0)]
    assert scalars[0] != scalars[1]


# ---- plans


def frozen_parts(axes: dict[str, int], size: int, seed: int = 0) -> ShardedModel:
    parts = shard_by_hand(axes, size, seed)
    freeze(parts.module)
    return parts


def freeze(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.startswith("norm"))


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [p for p in module.parameters() if p.requires_grad]}], lr=0.1)


def save_under(rank: int, size: int, axes: dict[str, int], path: Path) -> Any:
    """Saves a checkpoint without frozen weights after one step, and returns the descriptions of what is left out."""
    parts = frozen_parts(axes, size)
    optimizer = optimizer_of(parts.module)
    optimizer.step()
    entries = optimizer_state(parts.module, optimizer, parts.layouts, parts.tied, parts.mesh)
    whole = {**model_state(parts.module, parts.layouts), **entries, "schedule": None}
    state = without_frozen(whole, parts.module)
    save_at(state, path, 1, {"step": 1, "position": [0, 1], "seed": 0})
    return state[FROZEN]


def load_under(rank: int, size: int, axes: dict[str, int], path: Path, change: bool = False) -> dict[str, Tensor]:
    parts = frozen_parts(axes, size)
    with torch.no_grad():
        for parameter in parts.module.parameters():
            if parameter.requires_grad or change:
                parameter.add_(1.0)
    load(path, read_manifest(path), parts.module, optimizer_of(parts.module), parts.layouts, parts.tied, parts.mesh)
    return full_state(parts.module, parts.layouts, parts.mesh, order=list(whole_model().state_dict()))


def expected() -> dict[str, Tensor]:
    model = whole_model()
    freeze(model)
    optimizer_of(model).step()
    return dict(model.state_dict())


@pytest.mark.parametrize("axes", all_but(AXES[::5], AXES), ids=str)
def test_frozen_weights_are_left_out_under_every_plan(four: RankPool, axes: dict[str, int], tmp_path: Path) -> None:
    on_one_rank = save_under(0, 1, {}, tmp_path / "one")
    assert on_one_rank
    assert four.run(save_under, axes, tmp_path / "four") == [on_one_rank] * 4
    frozen = {f"model/{name}" for name in on_one_rank}
    for path in (tmp_path / "one", tmp_path / "four"):
        assert frozen.isdisjoint(tensors_of(path))
    assert equal_states(load_under(0, 1, {}, tmp_path / "four"), expected())
    for loaded in four.run(load_under, axes, tmp_path / "one"):
        assert equal_states(loaded, expected())


def test_all_ranks_refuse_other_frozen_weights(two: RankPool, tmp_path: Path) -> None:
    save_under(0, 1, {}, tmp_path / "one")
    with pytest.raises(RankFailure, match=r"saved without frozen weights, and .* of the model has other values"):
        two.run(load_under, {"shard": 2}, tmp_path / "one", True)


# ---- jobs


def test_a_run_without_frozen_weights_in_its_checkpoints_resumes_bitwise(tmp_path: Path) -> None:
    job = toy_job(train=FREEZE, checkpoint=WITHOUT_FROZEN)
    whole = session_of(train(job, tmp_path / "whole")).state_dict()
    train(job, tmp_path / "stopped", stop_after=4)
    names = tensors_of(newest(tmp_path / "stopped"))
    assert "model/layers.6.weight" in names
    assert names.isdisjoint({"model/layers.0.weight", "model/layers.0.bias", "model/layers.3.weight"})
    assert equal_states(session_of(train(job, tmp_path / "stopped")).state_dict(), whole)


def test_another_base_is_refused(tmp_path: Path) -> None:
    base = make_trainer(toy_job(train={**FREEZE, "seed": 8}), tmp_path / "base")
    torch.save(session_of(base).state_dict(), tmp_path / "base.pt")
    job = toy_job(train={**FREEZE, "weights": str(tmp_path / "base.pt")}, checkpoint=WITHOUT_FROZEN)
    run = train_run(job, tmp_path / "run")
    trained = session_of(train(job, tmp_path / "run")).state_dict()
    assert equal_states(dict(read_run(run).model.state_dict()), trained)
    assert export(run, "safetensors", limit=0).bytes > 0

    weights = torch.load(tmp_path / "base.pt")
    weights["layers.3.weight"][2, 1] += 1e-3
    torch.save(weights, tmp_path / "base.pt")
    with pytest.raises(CheckpointError, match=r"and layers\.3\.weight of the model has other values than when it was"):
        train(job, tmp_path / "run")
    with pytest.raises(CheckpointError, match="build the model with the same base weights"):
        read_run(run)


def change_frozen_weight(trainer: Trainer) -> None:
    with torch.no_grad():
        session_of(trainer).module.get_parameter("layers.3.weight").add_(1.0)


def test_a_frozen_weight_that_was_changed_is_saved(tmp_path: Path) -> None:
    trainer = make_trainer(toy_job(train=FREEZE, checkpoint=WITHOUT_FROZEN), tmp_path / "run")
    session = session_of(trainer)
    trainer.checkpoints.note_start(session.state(), session.module)
    change_frozen_weight(trainer)
    path = trainer.checkpoints.save(session.state(), 0, session.about(), None)
    assert "model/layers.3.weight" in tensors_of(path)


def test_a_session_saves_without_frozen_weights(tmp_path: Path) -> None:
    trainer = make_trainer(toy_job(train=FREEZE), tmp_path / "run")
    session = session_of(trainer)
    path = session.save(tmp_path / "small", frozen=False)
    assert "model/layers.3.weight" not in tensors_of(path)
    assert "model/layers.3.weight" in tensors_of(session.save(tmp_path / "whole"))
    session.load(path)
    change_frozen_weight(trainer)
    with pytest.raises(CheckpointError, match=r"layers\.3\.weight of the model has other values"):
        session.load(path)


def test_a_frozen_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    path = session_of(make_trainer(toy_job(train=FREEZE), tmp_path / "run")).save(tmp_path / "small", frozen=False)
    other = toy_job(train=FREEZE, model={"call": "tests.train.toy:Net", "hidden": 9})
    words = r"layers\.0\.weight was a frozen float32 of \(8, 20\) at the save, but is float32 of \(9, 20\) in the model"
    with pytest.raises(CheckpointError, match=words):
        session_of(make_trainer(other, tmp_path / "other")).load(path)


@pytest.mark.parametrize("frozen", [3, {"w": 3}, {"w": ["float32", [2], 5]}, {"w": ["float32", [-1], "00"]}])
def test_damaged_descriptions_are_found(frozen: Any) -> None:
    objects: dict[str, Any] = {GROUPS: [], "schedule": None, FROZEN: frozen}
    assert check_contents({}, objects) == "its descriptions of frozen weights are not dtypes, shapes and digests"
    assert check_contents({}, {**objects, FROZEN: {}}) is None


def test_a_weight_cannot_be_there_and_left_out() -> None:
    objects: dict[str, Any] = {GROUPS: [], "schedule": None, "model/w": 1, FROZEN: {"w": ["float32", [2], "00"]}}
    assert check_contents({}, json.loads(json.dumps(objects))) == "it has 'w', but says that this weight was left out"


def test_parameter_servers_save_all_weights() -> None:
    plan = Plan.model_validate({"axes": {"replicate": 2}, "gradients": {"servers": 1}})
    with pytest.raises(InputError, match=r"checkpoint\.frozen is false, but parameter servers save all weights"):
        check_job(toy_job(checkpoint=WITHOUT_FROZEN), plan, find_cluster("3xcpu"))
