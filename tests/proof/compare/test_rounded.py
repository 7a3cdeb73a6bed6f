"""Proofs in the plan's own precision: clean plans pass, and an error of 1% in one gradient does not."""

from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.proof.compare.rounding import (
    LAMBDA,
    Off,
    Roundings,
    Summed,
    allowed,
    off,
    on_the_way,
    rounding,
    roundings_of,
)
from meshwright.proof.fault import Plant
from meshwright.proof.prove import with_precision
from meshwright.proof.question import OwnModel, Question
from tests.proof.cases import prove_here, question, random_question
from tests.proof.causes import faults
from tests.ranks import RankPool
from tests.soaked import all_but


class Blobs(Dataset[Any]):
    """Enough samples that roundings cancel in a gradient, as they do in a real one."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(512, 24, generator=generator)
        self.y = (self.x[:, :4].cumsum(1).argmax(1)).long()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(24, 32), nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.embed(x))
        out: Tensor = self.head(x + self.down(self.up(x).relu()))
        return out


PLANS: dict[str, dict[str, Any]] = {
    "replicate": {"axes": {"replicate": 2}},
    "replicate, gradients rounded": {"axes": {"replicate": 2}, "gradients": {"precision": "bf16"}},
    "accumulated": {"axes": {"replicate": 2}, "memory": {"accumulation": 2}},
    "shard": {"axes": {"shard": 2}},
    "shard, weights rounded": {"axes": {"shard": 2}, "numerics": {"cast": "weights"}},
    "tensor": {
        "axes": {"tensor": 2},
        "modules": {"splits": {"up": {"kind": "column"}, "down": {"kind": "row"}}},
    },
    "pipeline": {"axes": {"pipeline": 2}, "pipeline": {"microbatches": 2, "cuts": ["norm"]}},
}


def blobs(plan: str, precision: str, **asked: Any) -> Question:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Layers()
    made = Plan.model_validate(PLANS[plan])
    made = made.model_copy(update={"numerics": made.numerics.model_copy(update={"precision": precision})})
    own = OwnModel(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), nn.CrossEntropyLoss(), Blobs(), 256, clip_norm=0.5
    )
    return Question(own, made, **{"steps": 2, "dtype": "plan", **asked})


def in_precision(asked: Question, precision: str) -> Question:
    numerics = asked.plan.numerics.model_copy(update={"precision": precision})
    return replace(asked, dtype="plan", plan=asked.plan.model_copy(update={"numerics": numerics}))


CASES = [(plan, precision) for plan in PLANS for precision in ("bf16", "fp16") if plan != "shard, weights rounded"]
CASES += [("shard, weights rounded", "bf16"), ("replicate", "fp32"), ("tensor", "tf32")]


QUICK = {("replicate", "bf16"), ("tensor", "bf16"), ("shard, weights rounded", "bf16"), ("pipeline", "fp16")}


@pytest.mark.parametrize(("plan", "precision"), all_but(QUICK, CASES))
def test_a_plan_passes_in_its_own_precision_and_an_error_of_1_percent_does_not(
    two: RankPool, tmp_path: Path, plan: str, precision: str
) -> None:
    asked = blobs(plan, precision)
    clean = two.run(prove_here, asked, tmp_path)[0]
    assert clean["equal"], clean["first_difference"]
    assert clean["dtype"] == precision
    assert clean["checked"]["gradients"] >= 2 * 10
    assert clean["max_relative_error"] <= clean["tolerance"] < 0.01

    wrong = two.run(prove_here, replace(asked, steps=1, plant=Plant(1.01, parameter="*embed.weight")), tmp_path)[0]
    first = wrong["first_difference"]
    assert (first["what"], first["parameter"], first["cause"]) == ("gradient", "embed.weight", "scaled")
    assert first["error"] > wrong["tolerance"]
    assert first["explanation"].startswith("in fp64: ")


@pytest.mark.parametrize("fault", [faults.NotReplicated(), faults.NotHeld(), faults.OtherStart()])
def test_other_faults_are_seen_too(two: RankPool, tmp_path: Path, fault: Any) -> None:
    asked = replace(in_precision(question("plain", optimizer="sgd", plan=PLANS["replicate"]), "bf16"), plant=fault)
    assert not two.run(prove_here, asked, tmp_path)[0]["equal"]


def test_what_only_the_precision_breaks_is_called_so(two: RankPool, tmp_path: Path) -> None:
    """Gradients that lose half their digits on the way, in a training whose plan says fp32."""
    asked = replace(blobs("replicate", "fp32"), plant=OnlyInFp32(), steps=1)
    told = two.run(prove_here, asked, tmp_path)[0]
    first = told["first_difference"]
    assert first["cause"] == "low_precision"
    assert "in fp64 the plan trains as one device does" in first["explanation"]


class OnlyInFp32(Plant):
    def on_gradients(self, session: Any, step: int) -> None:
        for parameter in session.module.parameters():
            if parameter.dtype == torch.float32:
                parameter.grad.copy_(parameter.grad.bfloat16())


@pytest.mark.soak
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("seed", range(10))
def test_random_plans_raise_no_alarm(two: RankPool, tmp_path: Path, seed: int, precision: str) -> None:
    asked = in_precision(random_question(seed, 2, ("replicate", "shard")), precision)
    told = two.run(prove_here, asked, tmp_path)[0]
    assert told["equal"], told["first_difference"]
    assert told["checked"]["gradients"] > 0


def test_steps_that_fp16_leaves_out_are_made_up_for(two: RankPool, tmp_path: Path) -> None:
    """A loss so large that its gradients overflow until the factor on it has been halved a few times."""
    asked = in_precision(question("plain", "loud", plan=PLANS["replicate"], steps=2), "fp16")
    told = two.run(prove_here, asked, tmp_path)[0]
    assert told["equal"], told["first_difference"]
    assert any("left out" in note for note in told["notes"])
    assert told["checked"]["gradients"] == 2 * 4


def test_a_precision_that_is_not_chosen_yet_cannot_be_compared_in() -> None:
    plan = Plan.model_validate({"numerics": {"precision": "auto"}})
    assert with_precision(plan, "fp64").numerics.precision == "fp32"
    with pytest.raises(InputError, match="name it"):
        with_precision(plan, "plan")


# ---- how much is allowed


def test_a_wrong_factor_is_all_along_and_noise_is_hardly() -> None:
    right = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    noise = 0.01 * torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    assert off(1.01 * right, right, 1.0).along == pytest.approx(0.01, rel=1e-3)
    found = off(right + noise, right, 1.0)
    assert found.spread == pytest.approx(0.01, rel=0.05)
    assert found.along < 0.001


def test_what_one_side_does_not_have_is_infinitely_off() -> None:
    some = torch.ones(3)
    assert off(None, some, 1.0) == Off(float("inf"), float("inf"))
    assert off(None, torch.zeros(3), 1.0) == Off(0.0, 0.0)
    assert off(torch.tensor([1.0, float("nan")]), torch.ones(2), 1.0).spread == float("inf")


def test_allowed_is_what_passes_were_off_and_not_less_than_is_known_to_round() -> None:
    expected = {"a": torch.ones(4), "b": torch.ones(4)}
    passes = [{"a": Off(0.1, 0.02), "b": Off(0.0, 0.0)}, {"a": Off(0.2, 0.01), "b": Off(0.0, 0.0)}]
    found = allowed(passes, [{"loss": 0.0}, {"loss": 0.1}], expected, {"a": 0.001, "b": 0.004})
    assert astuple(found.tensors["a"]) == pytest.approx((LAMBDA * 0.2, LAMBDA * 0.1))
    assert astuple(found.tensors["b"]) == pytest.approx((LAMBDA * 0.004, LAMBDA * 0.02))
    assert found.numbers == {"loss": pytest.approx(LAMBDA * 0.1)}
    assert found.share("a", Off(LAMBDA * 0.2, 0.0)) == pytest.approx(1)
    assert found.share("a", Off(0.0, 2 * LAMBDA * 0.1)) == pytest.approx(2)


def test_shorter_types_tensor_ranks_and_travel_round_more() -> None:
    def of(precision: str, tensor: int = 1) -> Roundings:
        plan = Plan.model_validate({"axes": {"tensor": tensor}, "numerics": {"precision": precision}})
        return roundings_of(plan, 1000, "cpu")

    assert of("fp32").size < of("fp16").size < of("bf16").size
    assert of("bf16").parts < of("bf16", 2).parts < of("bf16", 4).parts
    assert of("tf32") == of("fp32")
    assert on_the_way(Plan.model_validate(PLANS["replicate"])) == 0
    assert on_the_way(Plan.model_validate(PLANS["replicate, gradients rounded"])) > 0


def test_layers_are_disturbed_forward_and_backward_and_only_inside() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(300, 300)
    x = torch.randn(50, 300, requires_grad=True)
    usual = layer(x)
    usually = Roundings(0.0, 2.0**-7, 0.1, 0.0)
    with rounding(layer, lambda fan_in: usually, Summed(frozenset(), frozenset()), seed=0):
        disturbed = layer(x)
    share = (disturbed != usual).float().mean()
    assert 0.08 < share < 0.12
    (gradient,) = torch.autograd.grad(disturbed.sum(), x)
    assert not torch.equal(gradient, torch.autograd.grad(usual.sum(), x)[0])
    assert torch.equal(layer(x), usual)
