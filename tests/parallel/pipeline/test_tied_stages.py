"""A tied weight on two stages of one rank, as under zbv, is one parameter: it is divided, counted and saved once."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from meshwright.errors import InputError
from meshwright.model_io.batch import ModelBatch
from meshwright.parallel.apply import apply
from meshwright.parallel.mesh import build_mesh
from meshwright.parallel.pipeline.check import check_pipeline
from meshwright.parallel.pipeline.stages import cut_stages
from meshwright.parallel.shard import shard
from meshwright.plan import Plan
from meshwright.profile.structure.structure import find_structure
from tests.parallel.pipeline.test_pipeline import microbatches_of, model_and_batch, total
from tests.parallel.zoo_sessions import check_checkpoints_move
from tests.proof.matrix import plan_of
from tests.ranks import RankPool
from tests.zoo import ZOO, RandomSamples

TIED = ("words.weight", "decode.weight")
FOUR_STAGES = ("blocks.0", "blocks.1", "blocks.2")


def bert() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    data = RandomSamples("tokens")
    return ZOO["bert"].model().double().eval(), default_collate([data[index] for index in range(4)])


def train_divided(rank: int, size: int) -> dict[str, Any]:
    model, batch = bert()
    parallel = apply(plan_of("bert", "T2P2 zbv"), model, torch.device("cpu"), size, batch)
    assert parallel.pipeline is not None
    stages = parallel.pipeline.local_stages.stages
    tied = {id(p) for s in stages for name, p in s.model.named_parameters(remove_duplicate=False) if name in TIED}
    parallel.run_microbatches(microbatches_of(batch, [2, 2]), lambda output, *_: total(output), lambda _, loss: loss)
    return {
        "parameters": len(tied),
        "names": [name for name in parallel.parameters() if name in TIED],
        "layouts": {parallel.layouts[name] for name in TIED if name in parallel.layouts},
        "norm": float(parallel.clip_(math.inf)),
        "gradient": parallel.full_gradients()["words.weight"],
        "state": parallel.full_state(),
    }


def test_both_stages_hold_the_same_shard(four: RankPool) -> None:
    model, (tokens, target) = bert()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for example in (ModelBatch((part,), {}, target) for part in tokens.split(2)):
        total(model(*example.arguments)).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = float(torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt())
    for rank, result in enumerate(four.run(train_divided)):
        has_tied = int(result["parameters"] > 0)
        assert result["parameters"] == has_tied
        assert result["names"] == ["words.weight"] * has_tied, "the optimizer gets it once"
        assert len(result["layouts"]) == has_tied
        assert result["norm"] == pytest.approx(norm, rel=1e-9), rank
        torch.testing.assert_close(result["gradient"], model.get_parameter("words.weight").grad, rtol=1e-9, atol=1e-12)
        assert list(result["state"]) == list(state)
        assert all(torch.equal(value, state[name]) for name, value in result["state"].items())


@pytest.mark.soak
def test_checkpoints_load_under_other_plans(four: RankPool, tmp_path: Path) -> None:
    zbv, interleaved = plan_of("bert", "T2P2 zbv"), plan_of("bert", "S2P2 interleaved_1f1b")
    check_checkpoints_move(four, "bert", zbv, interleaved, tmp_path)


# ---- parameters that FSDP2 cannot divide


def sharded(schedule: str, cuts: tuple[str, ...] = FOUR_STAGES, shard: int = 2) -> Plan:
    pipeline = {"schedule": schedule, "microbatches": 4, "cuts": cuts}
    return Plan.model_validate({"axes": {"shard": shard, "pipeline": 2}, "pipeline": pipeline})


@pytest.mark.parametrize("name", ["tied", "tied in forward"])
def test_a_weight_that_would_be_sharded_for_two_stages_of_a_rank_is_refused(name: str) -> None:
    model_structure = find_structure(*model_and_batch(name))
    with pytest.raises(InputError) as refusal:
        check_pipeline(sharded("zbv"), model_structure)
    assert str(refusal.value) == (
        "plan.axes.shard is 2 and cannot divide words.weight: stages 0 and 3 use it, and zbv has some of them on one"
        " rank; choose the schedule interleaved_1f1b, zero_bubble or 1f1b with 1 cut, or replicate in the place of"
        " shard"
    )
    for plan in (sharded("interleaved_1f1b"), sharded("zero_bubble"), sharded("1f1b", FOUR_STAGES[:1])):
        check_pipeline(plan, model_structure)
    check_pipeline(sharded("zbv", shard=1), model_structure)


class Scaled(nn.Module):
    """The forward pass between the blocks uses a parameter in every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.scale
        return x


def shard_parameter_used_between_stages(rank: int, size: int) -> str:
    model, batch, plan = Scaled(), (torch.randn(8, 8), torch.zeros(8)), sharded("interleaved_1f1b")
    model_structure = find_structure(model, batch)
    check_pipeline(plan, model_structure)  # it knows only that the first and the last stage use the parameter
    mesh = build_mesh(plan, "cpu", size)
    assert mesh is not None
    try:
        for stage in cut_stages(model, plan, model_structure, mesh.get_local_rank("pipeline"), batch).stages:
            shard(stage, mesh, plan)
    except InputError as error:
        return str(error)
    return ""


def test_a_parameter_that_stages_in_between_use_is_refused_when_they_are_sharded(four: RankPool) -> None:
    for message in four.run(shard_parameter_used_between_stages):
        assert (
            "cannot divide scale: several stages use it, and interleaved_1f1b has some of them on one rank" in message
        )
