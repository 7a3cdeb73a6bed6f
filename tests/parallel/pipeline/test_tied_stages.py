"""A tied weight on two stages of one rank, as zbv lays them, is one parameter: divided, counted and saved once."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from meshwright.batch import Example
from meshwright.errors import InputError
from meshwright.parallel.apply import apply
from meshwright.parallel.mesh import build_mesh
from meshwright.parallel.pipeline.check import check_pipeline
from meshwright.parallel.pipeline.stages import cut_stages
from meshwright.parallel.shard import shard
from meshwright.plan import Plan
from meshwright.profile.structure.structure import structure
from tests.parallel.branches.test_branches import load, save
from tests.parallel.pipeline.test_pipeline import made, parts_of, total
from tests.proof.matrix import plan_of
from tests.ranks import RankPool
from tests.zoo import ZOO, Made

TIED = ("words.weight", "decode.weight")
FOUR_STAGES = ("blocks.0", "blocks.1", "blocks.2")


def bert() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    data = Made("tokens")
    return ZOO["bert"].model().double().eval(), default_collate([data[index] for index in range(4)])


def divided(rank: int, size: int) -> dict[str, Any]:
    model, batch = bert()
    parallel = apply(plan_of("bert", "T2P2 zbv"), model, torch.device("cpu"), size, batch)
    assert parallel.pipeline is not None
    stages = parallel.pipeline.cutting.stages
    found = {id(p) for s in stages for name, p in s.model.named_parameters(remove_duplicate=False) if name in TIED}
    parallel.run(parts_of(batch, [2, 2]), lambda _, output: total(output))
    return {
        "parameters": len(found),
        "names": [name for name in parallel.parameters() if name in TIED],
        "layouts": {parallel.layouts[name] for name in TIED if name in parallel.layouts},
        "norm": float(parallel.clip_(math.inf)),
        "gradient": parallel.full_gradients()["words.weight"],
        "state": parallel.full_state(),
    }


def test_both_stages_hold_the_same_part(four: RankPool) -> None:
    model, (tokens, target) = bert()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for example in (Example((part,), {}, target) for part in tokens.split(2)):
        total(model(*example.arguments)).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = float(torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt())
    for rank, found in enumerate(four.run(divided)):
        here = int(found["parameters"] > 0)
        assert found["parameters"] == here
        assert found["names"] == ["words.weight"] * here, "the optimizer has it once"
        assert len(found["layouts"]) == here
        assert found["norm"] == pytest.approx(norm, rel=1e-9), rank
        torch.testing.assert_close(found["gradient"], model.get_parameter("words.weight").grad, rtol=1e-9, atol=1e-12)
        assert list(found["state"]) == list(state)
        assert all(torch.equal(value, state[name]) for name, value in found["state"].items())


@pytest.mark.soak
def test_checkpoints_go_to_and_come_from_other_plans(four: RankPool, tmp_path: Path) -> None:
    folded, round_ = plan_of("bert", "T2P2 zbv"), plan_of("bert", "S2P2 interleaved_1f1b")
    saved = four.run(save, "bert", folded, tmp_path / "folded")
    expected = save(0, 1, "bert", Plan(), tmp_path / "alone")
    found: list[dict[str, Tensor]] = [
        *saved,
        load(0, 1, "bert", Plan(), tmp_path / "folded"),
        *four.run(load, "bert", folded, tmp_path / "alone"),
        *four.run(load, "bert", round_, tmp_path / "folded"),
    ]
    for state in found:
        assert list(state) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12, msg=name)


# ---- what FSDP2 cannot divide


def sharded(schedule: str, cuts: tuple[str, ...] = FOUR_STAGES, shard: int = 2) -> Plan:
    pipeline = {"schedule": schedule, "microbatches": 4, "cuts": cuts}
    return Plan.model_validate({"axes": {"shard": shard, "pipeline": 2}, "pipeline": pipeline})


@pytest.mark.parametrize("name", ["tied", "tied in forward"])
def test_a_weight_that_would_be_sharded_for_two_stages_of_a_rank_is_refused(name: str) -> None:
    found = structure(*made(name))
    with pytest.raises(InputError) as refusal:
        check_pipeline(sharded("zbv"), found)
    assert str(refusal.value) == (
        "plan.axes.shard is 2 and cannot divide words.weight: stages 0 and 3 use it, and zbv has some of them on one"
        " rank; choose the schedule interleaved_1f1b, zero_bubble or 1f1b with 1 cut, or replicate in the place of"
        " shard"
    )
    for plan in (sharded("interleaved_1f1b"), sharded("zero_bubble"), sharded("1f1b", FOUR_STAGES[:1])):
        check_pipeline(plan, found)
    check_pipeline(sharded("zbv", shard=1), found)


class Scaled(nn.Module):
    """Its own forward pass uses a weight in every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.scale
        return x


def used_between(rank: int, size: int) -> str:
    model, batch, plan = Scaled(), (torch.randn(8, 8), torch.zeros(8)), sharded("interleaved_1f1b")
    found = structure(model, batch)
    check_pipeline(plan, found)  # which knows of the first and the last stage
    mesh = build_mesh(plan, "cpu", size)
    assert mesh is not None
    try:
        for stage in cut_stages(model, plan, found, mesh.get_local_rank("pipeline"), batch).stages:
            shard(stage, mesh, plan)
    except InputError as error:
        return str(error)
    return ""


def test_one_that_stages_between_use_is_refused_when_they_are_made(four: RankPool) -> None:
    for words in four.run(used_between):
        assert "cannot divide scale: several stages use it, and interleaved_1f1b has some of them on one rank" in words
