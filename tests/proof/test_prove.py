"""Proofs of correct plans and of broken ones, in ranks that are started once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.plan import Plan
from meshwright.plan_rules.table import check_rules
from meshwright.proof.prove import with_fixed_precision
from tests.proof.cases import LOSSES, proof_request, prove_in_pool, random_request
from tests.proof.injected_fault import ScaledGradients
from tests.ranks import RankPool, ranks
from tests.soaked import all_but

LARGEST_TOLERANCE = 1e-9  # of these models in fp64


def prove(pool: RankPool, folder: Path, *names: str, **options: Any) -> dict[str, Any]:
    """The proof for a model, loss and optimizer of `cases`, by name, replicated over all ranks of the pool."""
    named: dict[str, Any] = dict(zip(("model", "loss", "optimizer"), names, strict=False))
    plan = {"axes": {"replicate": pool.world_size}, **options.pop("plan", {})}
    proof: dict[str, Any] = pool.run(prove_in_pool, proof_request(**named, **options, plan=plan), folder)[0]
    return proof


def assert_equal(proof: dict[str, Any]) -> None:
    assert proof["equal"], proof["first_difference"]
    assert proof["first_difference"] is None
    assert proof["max_relative_error"] <= proof["tolerance"] <= LARGEST_TOLERANCE


ACCUMULATED = {"memory": {"accumulation": 2}}


@pytest.mark.parametrize(
    ("names", "options"),
    [
        *[(("plain", loss), {"ignored": 6, "plan": ACCUMULATED}) for loss in LOSSES],
        (("attending",), {"ignored": 6, "plan": ACCUMULATED}),
        (("attending", "smoothed", "rmsprop"), {"clip_norm": None}),
        (("normalized",), {"size": 23}),
        (("normalized", "class weights"), {"size": 23, "ignored": 6, "plan": ACCUMULATED}),
        (("residual",), {"size": 23, "plan": {"memory": {"accumulation": 2, "recompute": "full"}}}),
        (("normalized", "squared", "sgd"), {"size": 22, "plan": ACCUMULATED, "steps": 5}),
    ],
)
def test_a_right_plan_is_proved(two: RankPool, tmp_path: Path, names: tuple[str, ...], options: dict[str, Any]) -> None:
    assert_equal(prove(two, tmp_path, *names, **options))


def test_every_loss_gradient_buffer_and_weight_is_checked(three: RankPool, tmp_path: Path) -> None:
    proof = prove(three, tmp_path, "normalized", size=23)
    assert_equal(proof)
    assert (proof["ranks"], proof["steps"]) == (3, 3)
    # 6 parameters and 3 buffers; weights and buffers also before the first step
    assert proof["checked"] == {"losses": 3, "gradients": 18, "norms": 3, "buffers": 12, "weights": 24}
    assert json.loads(json.dumps(proof)) == proof
    assert list(tmp_path.glob("step-*")) == [tmp_path / "step-0000.pt"], "a step that was read leaves the disk"


def test_notes_say_over_which_samples_batch_norm_took_its_statistics(two: RankPool, tmp_path: Path) -> None:
    notes = prove(two, tmp_path, "normalized", size=23, plan=ACCUMULATED)["notes"]
    assert any("BatchNorm is local (2 data ranks × 2 microbatches)" in note for note in notes)
    assert any("dropout is off" in note for note in notes)
    assert prove(two, tmp_path, "plain", optimizer="sgd")["notes"] == []


def test_a_note_counts_weights_that_rounding_alone_decides(two: RankPool, tmp_path: Path) -> None:
    """Adagrad divides a gradient of 1e-17 by 1e-10: the bias before BatchNorm differs under every plan."""
    proof = prove(two, tmp_path, "normalized", optimizer="adagrad", size=23, plan=ACCUMULATED)
    assert_equal(proof)
    assert any("rounding alone decides was taken over" in note for note in proof["notes"])


def test_dropout_can_be_compared_too(two: RankPool, tmp_path: Path) -> None:
    proof = prove(two, tmp_path, "normalized", size=23, plan=ACCUMULATED, dropout=True)
    assert_equal(proof)
    assert any("dropout is on" in note for note in proof["notes"])


def test_single_precision_has_a_wider_tolerance(two: RankPool, tmp_path: Path) -> None:
    proof = prove(two, tmp_path, "normalized", optimizer="sgd", size=23, dtype="fp32")
    assert proof["equal"], proof["first_difference"]
    assert 1e-9 < proof["max_relative_error"] < proof["tolerance"] < 1e-2


# ---- faults


@pytest.mark.parametrize("factor", all_but([1 + 1e-6], [1.01, 1 + 1e-4, 1 + 1e-6, 0.5]))
def test_scaled_gradients_are_found(two: RankPool, tmp_path: Path, factor: float) -> None:
    proof = prove(two, tmp_path, "normalized", size=23, prepare_session=ScaledGradients(factor))
    assert not proof["equal"]
    first = proof["first_difference"]
    assert (first["step"], first["what"], first["parameter"], first["cause"]) == (1, "gradient", "head.bias", "scaled")
    assert first["error"] > proof["tolerance"]
    assert proof["max_relative_error"] == pytest.approx(abs(factor - 1), rel=1e-3)


def test_the_parameter_and_the_step_are_named(two: RankPool, tmp_path: Path) -> None:
    fault = ScaledGradients(1.0001, parameter="attention.in_proj_weight", step=2)
    first = prove(two, tmp_path, "attending", prepare_session=fault)["first_difference"]
    assert (first["step"], first["parameter"]) == (2, "attention.in_proj_weight")


def test_a_single_wrong_replica_is_found_in_the_first_step(two: RankPool, tmp_path: Path) -> None:
    proof = prove(two, tmp_path, "plain", optimizer="sgd", prepare_session=ScaledGradients(1.001, rank=1))
    assert not proof["equal"]
    first = proof["first_difference"]
    assert (first["step"], first["what"], first["rank"], first["cause"]) == (1, "gradient", 1, "scaled")
    assert proof["notes"][-1].startswith("nothing was compared after step 1")


# ---- many plans


@pytest.mark.parametrize("seed", all_but([0, 1], range(4)))
def test_random_plans_give_no_false_alarm(three: RankPool, tmp_path: Path, seed: int) -> None:
    assert_equal(three.run(prove_in_pool, random_request(seed, 3), tmp_path)[0])


@pytest.mark.soak
def test_fifty_random_plans_give_no_false_alarm(tmp_path: Path) -> None:
    """The same plans with gradients that are wrong by a millionth are not proved."""
    for size in (2, 3, 4):
        with ranks(size) as pool:
            for seed in range(100 * size, 100 * size + 17):
                request = random_request(seed, size)
                assert_equal(pool.run(prove_in_pool, request, tmp_path)[0])
                broken = replace(request, prepare_session=ScaledGradients(1 + 1e-6))
                assert not pool.run(prove_in_pool, broken, tmp_path)[0]["equal"]


def test_auto_precision_can_be_proved() -> None:
    auto = Plan.model_validate({"axes": {"replicate": 2}, "numerics": {"precision": "auto"}})
    check_rules(with_fixed_precision(auto, "fp64"))
    named = Plan.model_validate({"numerics": {"precision": "fp16"}})
    assert with_fixed_precision(named, "fp64") is named


@pytest.mark.parametrize("algorithm", ["native", "ring", "tree", "halving_doubling", "two_level", "shared_memory"])
def test_every_all_reduce_algorithm_is_proved(three: RankPool, tmp_path: Path, algorithm: str) -> None:
    plan = {"axes": {"replicate": 3}, "gradients": {"algorithm": algorithm, "bucket_bytes": 300}}
    proof = three.run(prove_in_pool, proof_request("attending", plan=plan), tmp_path)[0]
    assert_equal(proof)


def test_options_that_train_differently_by_design_are_left_out_with_a_note(two: RankPool, tmp_path: Path) -> None:
    for name, value in (("powersgd_rank", 1), ("local_steps", 4)):
        plan = {"axes": {"replicate": 2}, "gradients": {name: value}}
        proof = two.run(prove_in_pool, proof_request("plain", plan=plan), tmp_path)[0]
        assert_equal(proof)
        assert f"compared without gradients.{name}, which trains differently from one device" in proof["notes"]
