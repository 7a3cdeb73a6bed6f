"""A rank holds its own modules under their names and no memory of the others; impossible cuts are refused before ranks
start."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.errors import InputError, MeshwrightError
from meshwright.parallel.pipeline.check import check_pipeline
from meshwright.parallel.pipeline.remote_modules import RemoteModule
from meshwright.parallel.pipeline.stages import LocalStages, cut_stages, pipeline_ranks_of_stages
from meshwright.plan import Plan
from meshwright.plan_rules.table import check_rules
from meshwright.profile.structure.structure import Structure, find_structure
from meshwright.simulator.pipeline.order import stages_of_rank
from tests.parallel.pipeline.test_pipeline import model_and_batch


def plan_of(ranks: int, cuts: tuple[str, ...], schedule: str = "gpipe", **groups: Any) -> Plan:
    pipeline = {"schedule": schedule, "microbatches": 4, "cuts": cuts, **groups.pop("pipeline", {})}
    return Plan.model_validate({"axes": {"pipeline": ranks}, "pipeline": pipeline, **groups})


def cut(name: str, plan: Plan, pipeline_rank: int) -> LocalStages:
    model, batch = model_and_batch(name)
    return cut_stages(model, plan, find_structure(model, batch), pipeline_rank, batch)


TWO = plan_of(2, ("blocks.1",))


def test_each_rank_holds_its_own_parameters_under_their_names() -> None:
    first, second = (cut("tied", TWO, rank) for rank in range(2))
    whole = dict(model_and_batch("tied")[0].named_parameters(remove_duplicate=False))
    names = [set(dict(part.module.named_parameters())) for part in (first, second)]
    assert {"words.weight", "places", "scale", "blocks.0.norm.weight"} <= names[0]
    assert {"head.weight", "norm.weight", "blocks.3.norm.weight"} <= names[1]
    assert not any(name.startswith(("blocks.2", "blocks.3", "head", "norm")) for name in names[0])
    assert not names[1] & {"words.weight", "places", "scale"}
    for part in (first, second):
        for name, parameter in part.module.named_parameters():
            assert torch.equal(parameter, whole[name])


def test_remote_modules_have_no_memory() -> None:
    part = cut("tied", TWO, 1)
    stub = part.module.get_submodule("words")
    assert isinstance(stub, RemoteModule)
    assert not list(stub.parameters())
    assert stub.num_embeddings == 100  # other attributes are those of the original
    assert stub.weight.is_meta
    with pytest.raises(MeshwrightError, match="words runs in another pipeline stage"):
        stub(torch.zeros(1, 1, dtype=torch.long))


def test_tied_weights_list_the_ranks_that_hold_them() -> None:
    assert [(t.name, t.local_name, t.holders) for t in cut("tied", TWO, 0).tied] == [
        ("words.weight", "words.weight", (0, 1))
    ]
    assert [(t.name, t.local_name, t.holders) for t in cut("tied", TWO, 1).tied] == [
        ("words.weight", "head.weight", (0, 1))
    ]
    # The forward pass itself uses the embedding's weight in the last stage, where the embedding is a remote module.
    used = cut("tied in forward", TWO, 1)
    assert [(t.name, t.local_name, t.holders) for t in used.tied] == [("words.weight", "words.weight", (0, 1))]
    assert cut("tied", plan_of(4, ("blocks.0", "blocks.1", "blocks.2")), 1).tied == ()


def test_a_weight_on_two_stages_of_one_rank_is_one_parameter() -> None:
    part = cut("tied", plan_of(2, ("blocks.0", "blocks.1", "blocks.2"), "zbv"), 0)
    assert part.tied == ()
    assert part.module.get_parameter("words.weight") is part.module.get_parameter("head.weight")


def test_stages_of_a_rank_share_modules_and_replaced_parameters() -> None:
    part = cut("tied", plan_of(2, ("blocks.0", "blocks.1", "blocks.2"), "interleaved_1f1b"), 0)
    first, second = part.stages
    assert (first.index, second.index) == (0, 2)
    assert first.model.get_submodule("blocks.0") is part.module.get_submodule("blocks.0")
    assert isinstance(first.model.get_submodule("blocks.2"), RemoteModule)
    assert isinstance(second.model.get_submodule("blocks.0"), RemoteModule)
    part.module.places = nn.Parameter(torch.zeros(3))
    part.module.get_submodule("blocks.2.norm").weight = nn.Parameter(torch.zeros(5))
    assert first.model.get_parameter("places").shape == (3,)
    assert second.model.get_parameter("blocks.2.norm.weight").shape == (5,)
    assert "places" not in dict(second.model.named_parameters())


@pytest.mark.parametrize(("schedule", "each"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 3), ("zbv", 2)])
def test_stages_are_on_the_ranks_that_the_simulator_assumes(schedule: str, each: int) -> None:
    cuts = tuple(f"blocks.{number}" for number in range(4 * each - 1))
    rank_of_stage = pipeline_ranks_of_stages(plan_of(4, cuts, schedule))
    for rank in range(4):
        assert tuple(
            stage for stage, pipeline_rank in enumerate(rank_of_stage) if pipeline_rank == rank
        ) == stages_of_rank(schedule, 4, each, rank)


# ---- pipelines that cannot run


def structure_of(name: str) -> Structure:
    return find_structure(*model_and_batch(name))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (plan_of(2, ("blocks.7",)), "after blocks.7: did you mean 'blocks.[0-3]'"),
        (plan_of(2, ("blocks.1.mix",)), "it lies inside blocks.1, .* nearest cuts are after blocks.0 and blocks.1"),
        (plan_of(2, ("head",)), "nothing runs after it; the nearest cuts are after norm"),
        (plan_of(3, ("blocks.2", "blocks.0")), "not in the order .* write blocks.0, blocks.2"),
        (plan_of(2, ()), "0 cuts make 1 stages, but gpipe on 2 ranks runs 2: choose 1 of the modules after"),
        (plan_of(2, ("blocks.0",), "1f1b", pipeline={"microbatches": 1}), "1f1b needs as many as ranks"),
        (
            plan_of(2, ("blocks.0",), "zero_bubble", pipeline={"microbatches": 5}),
            "is 5, which zero_bubble cannot run in 2 rounds on 2 ranks: choose 4 or 6",
        ),
    ],
)
def test_a_refusal_says_what_to_choose(plan: Plan, message: str) -> None:
    def check() -> None:
        check_rules(plan)
        check_pipeline(plan, structure_of("tied"))

    with pytest.raises(InputError, match=message):
        check()


def test_an_impossible_cut_is_refused_with_the_reason() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Linear(4, 2))
    model_structure = find_structure(model, torch.zeros(2, 4))
    with pytest.raises(
        InputError, match="after 1: 2 overwrites its input in place; the nearest cuts are after 0 and 2"
    ):
        check_pipeline(plan_of(2, ("1",)), model_structure)
    check_pipeline(plan_of(2, ("2",)), model_structure)


def test_a_model_that_drops_layers_at_random_is_refused() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if not self.training or torch.rand(()) > 0.1:
                    x = layer(x)
            return x

    with pytest.raises(InputError, match="chance or data decide"):
        check_pipeline(plan_of(2, ("layers.0",)), find_structure(Dropping(), torch.zeros(2, 4)))


def test_a_cut_inside_a_recomputed_block_is_refused() -> None:
    plan = plan_of(2, ("1.0",), memory={"recompute": "full"})
    with pytest.raises(InputError, match=r"cuts divide 1, which plan\.memory\.recompute computes again as a whole"):
        cut("mlp", plan, 0)
