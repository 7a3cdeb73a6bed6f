"""Proofs in the plan's own precision: correct plans pass, and an error of 1% in one gradient does not."""

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
    SAFETY_FACTOR,
    PartialSumLayers,
    RoundingNoise,
    TensorError,
    communication_rounding,
    inject_rounding_noise,
    rounding_allowance,
    rounding_noise,
    tensor_error,
)
from meshwright.proof.prove import with_fixed_precision
from meshwright.proof.request import ProofRequest, UserModel
from tests.proof.cases import proof_request, prove_in_pool, random_request
from tests.proof.causes import faults
from tests.proof.injected_fault import InjectedFault, ScaledGradients
from tests.ranks import RankPool
from tests.soaked import all_but


class Blobs(Dataset[Any]):
    """Enough samples that roundings cancel in a gradient, as in real data."""

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


def blobs_request(plan: str, precision: str, **options: Any) -> ProofRequest:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Layers()
    fp32_plan = Plan.model_validate(PLANS[plan])
    numerics = fp32_plan.numerics.model_copy(update={"precision": precision})
    user_model = UserModel(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), nn.CrossEntropyLoss(), Blobs(), 256, clip_norm=0.5
    )
    rounded_plan = fp32_plan.model_copy(update={"numerics": numerics})
    return ProofRequest(user_model, rounded_plan, **{"steps": 2, "dtype": "plan", **options})


def in_precision(request: ProofRequest, precision: str) -> ProofRequest:
    numerics = request.plan.numerics.model_copy(update={"precision": precision})
    return replace(request, dtype="plan", plan=request.plan.model_copy(update={"numerics": numerics}))


CASES = [(plan, precision) for plan in PLANS for precision in ("bf16", "fp16") if plan != "shard, weights rounded"]
CASES += [("shard, weights rounded", "bf16"), ("replicate", "fp32"), ("tensor", "tf32")]


QUICK = {("shard, weights rounded", "bf16")}


@pytest.mark.parametrize(("plan", "precision"), all_but(QUICK, CASES))
def test_a_plan_passes_in_its_own_precision_and_an_error_of_1_percent_does_not(
    two: RankPool, tmp_path: Path, plan: str, precision: str
) -> None:
    request = blobs_request(plan, precision)
    clean = two.run(prove_in_pool, request, tmp_path)[0]
    assert clean["equal"], clean["first_difference"]
    assert clean["dtype"] == precision
    assert clean["checked"]["gradients"] >= 2 * 10
    assert clean["max_relative_error"] <= clean["tolerance"] < 0.01

    wrong = two.run(
        prove_in_pool,
        replace(request, steps=1, prepare_session=ScaledGradients(1.01, parameter="*embed.weight")),
        tmp_path,
    )[0]
    first = wrong["first_difference"]
    assert (first["what"], first["parameter"], first["cause"]) == ("gradient", "embed.weight", "scaled")
    assert first["error"] > wrong["tolerance"]
    assert first["explanation"].startswith("in fp64: ")


@pytest.mark.parametrize(
    "fault", [faults.NoReplicaReduction(), faults.MissingInOptimizer(), faults.DifferentInitialWeight()]
)
def test_other_faults_are_found_too(two: RankPool, tmp_path: Path, fault: Any) -> None:
    request = replace(
        in_precision(proof_request("plain", optimizer="sgd", plan=PLANS["replicate"]), "bf16"), prepare_session=fault
    )
    assert not two.run(prove_in_pool, request, tmp_path)[0]["equal"]


def test_a_difference_of_the_precision_alone_is_named_low_precision(two: RankPool, tmp_path: Path) -> None:
    """Gradients lose half their digits when they are combined, although the plan says fp32."""
    request = replace(blobs_request("replicate", "fp32"), prepare_session=RoundFp32Gradients(), steps=1)
    proof = two.run(prove_in_pool, request, tmp_path)[0]
    first = proof["first_difference"]
    assert first["cause"] == "low_precision"
    assert "in fp64 the plan trains as one device does" in first["explanation"]


class RoundFp32Gradients(InjectedFault):
    def on_gradients(self, session: Any, step: int) -> None:
        for parameter in session.module.parameters():
            if parameter.dtype == torch.float32:
                parameter.grad.copy_(parameter.grad.bfloat16())


@pytest.mark.soak
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("seed", range(10))
def test_random_plans_give_no_false_alarm(two: RankPool, tmp_path: Path, seed: int, precision: str) -> None:
    request = in_precision(random_request(seed, 2, ("replicate", "shard")), precision)
    proof = two.run(prove_in_pool, request, tmp_path)[0]
    assert proof["equal"], proof["first_difference"]
    assert proof["checked"]["gradients"] > 0


def test_steps_that_fp16_skips_are_replaced_by_further_ones(two: RankPool, tmp_path: Path) -> None:
    """The loss is so large that its gradients overflow until the loss scale has been halved a few times."""
    request = in_precision(proof_request("plain", "large", plan=PLANS["replicate"], steps=2), "fp16")
    proof = two.run(prove_in_pool, request, tmp_path)[0]
    assert proof["equal"], proof["first_difference"]
    assert any("were skipped by the ranks and by one device" in note for note in proof["notes"])
    assert proof["checked"]["gradients"] == 2 * 4


def test_auto_precision_cannot_be_compared_in_the_plans_own() -> None:
    plan = Plan.model_validate({"numerics": {"precision": "auto"}})
    assert with_fixed_precision(plan, "fp64").numerics.precision == "fp32"
    with pytest.raises(InputError, match="name it"):
        with_fixed_precision(plan, "plan")


# ---- how much rounding is allowed


def test_a_wrong_factor_is_all_in_the_projection_and_noise_hardly() -> None:
    right = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    noise = 0.01 * torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    assert tensor_error(1.01 * right, right, 1.0).projection == pytest.approx(0.01, rel=1e-3)
    error = tensor_error(right + noise, right, 1.0)
    assert error.spread == pytest.approx(0.01, rel=0.05)
    assert error.projection < 0.001


def test_a_tensor_that_one_side_does_not_have_has_an_infinite_error() -> None:
    assert tensor_error(None, torch.ones(3), 1.0) == TensorError(float("inf"), float("inf"))
    assert tensor_error(None, torch.zeros(3), 1.0) == TensorError(0.0, 0.0)
    assert tensor_error(torch.tensor([1.0, float("nan")]), torch.ones(2), 1.0).spread == float("inf")


def test_the_allowance_is_the_largest_error_of_the_passes_and_at_least_one_rounding() -> None:
    expected = {"a": torch.ones(4), "b": torch.ones(4)}
    passes = [
        {"a": TensorError(0.1, 0.02), "b": TensorError(0.0, 0.0)},
        {"a": TensorError(0.2, 0.01), "b": TensorError(0.0, 0.0)},
    ]
    allowance = rounding_allowance(passes, [{"loss": 0.0}, {"loss": 0.1}], expected, {"a": 0.001, "b": 0.004})
    assert astuple(allowance.tensors["a"]) == pytest.approx((SAFETY_FACTOR * 0.2, SAFETY_FACTOR * 0.1))
    assert astuple(allowance.tensors["b"]) == pytest.approx((SAFETY_FACTOR * 0.004, SAFETY_FACTOR * 0.02))
    assert allowance.numbers == {"loss": pytest.approx(SAFETY_FACTOR * 0.1)}
    assert allowance.used_share("a", TensorError(SAFETY_FACTOR * 0.2, 0.0)) == pytest.approx(1)
    assert allowance.used_share("a", TensorError(0.0, 2 * SAFETY_FACTOR * 0.1)) == pytest.approx(2)


def test_shorter_types_tensor_ranks_and_communication_round_more() -> None:
    def noise_of(precision: str, tensor: int = 1) -> RoundingNoise:
        plan = Plan.model_validate({"axes": {"tensor": tensor}, "numerics": {"precision": precision}})
        return rounding_noise(plan, 1000, "cpu")

    assert noise_of("fp32").rms < noise_of("fp16").rms < noise_of("bf16").rms
    assert (
        noise_of("bf16").partial_sum_error
        < noise_of("bf16", 2).partial_sum_error
        < noise_of("bf16", 4).partial_sum_error
    )
    assert noise_of("tf32") == noise_of("fp32")
    assert communication_rounding(Plan.model_validate(PLANS["replicate"])) == 0
    assert communication_rounding(Plan.model_validate(PLANS["replicate, gradients rounded"])) > 0


def test_noise_is_added_forward_and_backward_and_only_inside_the_context() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(300, 300)
    x = torch.randn(50, 300, requires_grad=True)
    exact = layer(x)
    noise = RoundingNoise(0.0, 2.0**-7, 0.1, 0.0)
    with inject_rounding_noise(layer, lambda fan_in: noise, PartialSumLayers(frozenset(), frozenset()), seed=0):
        noisy = layer(x)
    share = (noisy != exact).float().mean()
    assert 0.08 < share < 0.12
    (gradient,) = torch.autograd.grad(noisy.sum(), x)
    assert not torch.equal(gradient, torch.autograd.grad(exact.sum(), x)[0])
    assert torch.equal(layer(x), exact)
