"""All ranks save and load the same checkpoint, or end with the same error, also if only one of them has a problem."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshwright.checkpoint import save as save_module
from meshwright.checkpoint.load import load, read_manifest_once
from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.reader import open_checkpoint, plan_transfers, verify
from meshwright.checkpoint.save import check_savable, save_at
from meshwright.checkpoint.state import optimizer_state
from meshwright.checkpoint.writer import describe, plan_files, read_share, share_to_text
from meshwright.errors import CheckpointError, InputError, MeshwrightError
from tests.parallel.hand_sharded import shard_by_hand
from tests.ranks import RankPool

ABOUT: dict[str, Any] = {"step": 1, "position": [0, 1], "seed": 0}


def state_of(value: float) -> dict[str, Any]:
    return {"model/weight": torch.full((1, 3), float(value)), "optimizer_groups": [], "schedule": None}


def error_of(act: Any, *arguments: Any) -> str:
    try:
        act(*arguments)
    except MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ---- one checkpoint


def test_a_checkpoint_that_is_replaced_after_its_manifest_was_read_is_not_loaded(tmp_path: Path) -> None:
    """The index is the same, and the files have the same sizes."""
    path, model = tmp_path / "latest", nn.Linear(3, 1, bias=False)
    before = model.weight.detach().clone()
    save_at(state_of(1), path, 1, ABOUT)
    manifest = verify(path)
    save_at(state_of(2), path, 1, ABOUT)
    with pytest.raises(CheckpointError, match=r"rank-00000.bin does not have the checksum"):
        load(path, manifest, model, None)
    assert torch.equal(model.weight, before)


def test_what_is_read_is_the_file_that_was_verified(tmp_path: Path) -> None:
    path, memory = tmp_path / "latest", torch.zeros(1, 3)
    save_at(state_of(1), path, 1, ABOUT)
    with open_checkpoint(path, verify(path)) as reader:
        (part,) = plan_transfers(reader, "model/weight", {((0, 0), (1, 3)): memory})
        reader.files.open(part.piece.file)
        save_at(state_of(2), path, 1, ABOUT)
        assert reader.read_piece(part.key, part.piece, 0, 1).tolist() == [[1, 1, 1]]


def read_step(rank: int, size: int, path: Path) -> int:
    """Only rank 0 is given a path at which there is a checkpoint."""
    return read_manifest_once(path if rank == 0 else path / "nothing").step


def test_one_rank_reads_the_manifest_for_all(two: RankPool, tmp_path: Path) -> None:
    save_at(state_of(1), tmp_path / "saved", 1, ABOUT)
    assert two.run(read_step, tmp_path / "saved") == [1, 1]


# ---- one error


class Custom:
    """An object that cannot be saved."""


def check_on_one_rank(rank: int, size: int) -> str:
    return error_of(check_savable, {"schedule": Custom() if rank == 1 else None})


def test_a_state_that_only_one_rank_cannot_save_is_an_error_of_all(two: RankPool) -> None:
    first, second = two.run(check_on_one_rank)
    assert first == second
    assert first.startswith("CheckpointError: schedule is a tests.checkpoint.test_agreement.Custom")


def load_damaged_on_one_rank(rank: int, size: int, path: Path) -> tuple[str, bool]:
    model = nn.Linear(3, 1, bias=False)
    before = model.weight.detach().clone()
    message = error_of(load, path if rank == 0 else path.with_name("damaged"), read_manifest(path), model, None)
    return message.replace(str(path.parent), ""), torch.equal(model.weight, before)


def test_damage_that_only_one_rank_sees_is_an_error_of_all_and_nothing_is_loaded(two: RankPool, tmp_path: Path) -> None:
    save_at(state_of(1), tmp_path / "saved", 1, ABOUT)
    save_at(state_of(2), tmp_path / "damaged", 1, ABOUT)
    message = "CheckpointError: /damaged: rank-00000.bin does not have the checksum that its manifest says"
    assert two.run(load_damaged_on_one_rank, tmp_path / "saved") == [(message, True)] * 2


def save_different_shapes(rank: int, size: int, path: Path) -> str:
    return error_of(save_at, {**state_of(1), "model/bias": torch.zeros(3 + rank)}, path, 1, ABOUT)


def test_tensors_that_differ_between_ranks_are_named(two: RankPool, tmp_path: Path) -> None:
    first, second = two.run(save_different_shapes, tmp_path / "saved")
    assert first == second
    assert "model/bias is float32 (4,) on rank 1, but float32 (3,) on another rank" in first
    assert list(tmp_path.iterdir()) == []


# ---- optimizer entries of parameters that are divided among ranks


class KeepsHistory(torch.optim.SGD):
    """An optimizer whose state has a list of tensors."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                self.state[parameter]["history"] = [local.detach().clone()]


def save_history_of_shards(rank: int, size: int) -> str:
    model = nn.Linear(3, 4, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    optimizer = KeepsHistory(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return error_of(optimizer_state, model, optimizer)


def test_containers_of_tensors_of_divided_parameters_are_refused(two: RankPool) -> None:
    first, second = two.run(save_history_of_shards)
    assert first == second
    assert first.startswith(
        "InputError: KeepsHistory: its history of weight is a list of tensors, but the plan's axis shard divides this"
        " parameter among ranks"
    )


def save_history_on_one_stage(rank: int, size: int) -> str:
    """Only the ranks of one pipeline stage have a parameter that the tensor axis divides and that has such an entry."""
    parts = shard_by_hand({"pipeline": 2, "tensor": 2}, size)
    optimizer = torch.optim.SGD(parts.module.parameters(), lr=0.1)
    for name, parameter in parts.module.named_parameters():
        if name.startswith("embed"):
            optimizer.state[parameter]["history"] = {"last": (torch.zeros(2),)}
    return error_of(optimizer_state, parts.module, optimizer, parts.layouts, parts.tied, parts.mesh)


def test_an_entry_that_only_one_pipeline_stage_has_is_refused_on_all_ranks(four: RankPool) -> None:
    messages = four.run(save_history_on_one_stage)
    assert len(set(messages)) == 1
    assert "its history of embed.weight is a dict of tensors" in messages[0]


def test_containers_of_tensors_of_whole_parameters_are_saved_and_loaded(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False)
    optimizer, again = (KeepsHistory(m.parameters(), lr=0.1) for m in (model, other))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save_optimizer(tmp_path / "saved", model, optimizer)
    load(tmp_path / "saved", verify(tmp_path / "saved"), other, again)
    history: list[Tensor] = again.state[other.weight]["history"]
    assert torch.equal(history[0], optimizer.state[model.weight]["history"][0])


# ---- names of optimizer entries


def save_optimizer(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weights = {f"model/{name}": value for name, value in model.state_dict().items()}
    save_at({**weights, **optimizer_state(model, optimizer), "schedule": None}, path, 1, ABOUT)


def test_entries_may_have_slashes_and_percent_signs_in_their_names(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, nn.Parameter, torch.optim.Optimizer]:
        model = nn.Module()
        model.register_parameter("in/out", nn.Parameter(torch.ones(2)))
        parameter = model.get_parameter("in/out")
        return model, parameter, torch.optim.SGD([parameter], lr=0.1)

    (model, parameter, optimizer), (other, other_parameter, again) = make(), make()
    names = ["ema/slow", "a%2Fb", "100%", "plain", ""]
    for number, name in enumerate(names):
        optimizer.state[parameter][name] = torch.full((2,), float(number))
    optimizer.state[parameter]["count/of"] = 7
    save_optimizer(tmp_path / "saved", model, optimizer)
    load(tmp_path / "saved", verify(tmp_path / "saved"), other, again)
    state = again.state[other_parameter]
    assert {name: float(state[name][0]) for name in names} == {name: i for i, name in enumerate(names)}
    assert state["count/of"] == 7


def test_state_that_has_no_name_is_refused() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight][0] = torch.ones(1, 2)
    with pytest.raises(InputError, match="SGD names an entry of its state 0: checkpoints need texts as names"):
        optimizer_state(model, optimizer)
    del optimizer.state[model.weight]
    optimizer.state["global"]["step"] = 1  # type: ignore[index]
    with pytest.raises(InputError, match="SGD has state under a str that is no parameter of the model"):
        optimizer_state(model, optimizer)


# ---- rank 0 plans for all


def test_a_share_is_read_as_it_was_planned() -> None:
    texts = [describe({"model/w": torch.zeros(3), "schedule": rank}) for rank in range(2)]
    plan = plan_files([texts[0], texts[0]])
    assert [share.size for share in plan.shares] == [12, 0]
    for share in plan.shares:
        assert read_share(share_to_text(share)) == share


def save_and_count_plans(rank: int, size: int, path: Path) -> int:
    plans: list[int] = []

    def count(descriptions: Any) -> Any:
        plans.append(rank)
        return plan_files(descriptions)

    save_module.plan_files = count
    try:
        extra = {f"model/of_{rank}": torch.full((5,), float(rank))}
        save_at({**state_of(1), **extra}, path, 1, ABOUT)
    finally:
        save_module.plan_files = plan_files
    return len(plans)


def test_only_rank_0_reads_what_all_ranks_hold(two: RankPool, tmp_path: Path) -> None:
    assert two.run(save_and_count_plans, tmp_path / "saved") == [1, 0]
    verify(tmp_path / "saved")
    index = json.loads((tmp_path / "saved" / "index.json").read_text())
    files = {key: tensor["pieces"][0]["file"] for key, tensor in index["tensors"].items()}
    assert files["model/of_1"] == "rank-00001.bin"
    assert len(files) == 3
