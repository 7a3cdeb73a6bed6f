"""What a proof says of right plans and of wrong ones, in one world of ranks that is started once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.parallel.check import check_runnable
from meshwright.plan import Plan
from meshwright.proof.prove import with_precision
from tests.proof.cases import LOSSES, planted, prove_here, question, random_question
from tests.ranks import RankPool, ranks
from tests.soaked import all_but

LIMIT = 1e-9  # of a clean run in fp64


def proved(pool: RankPool, folder: Path, *words: str, **asked: Any) -> dict[str, Any]:
    named: dict[str, Any] = dict(zip(("model", "loss", "optimizer"), words, strict=False))
    plan = {"axes": {"replicate": pool.world_size}, **asked.pop("plan", {})}
    found: dict[str, Any] = pool.run(prove_here, question(**named, **asked, plan=plan), folder)[0]
    return found


def assert_equal(found: dict[str, Any]) -> None:
    assert found["equal"], found["first_difference"]
    assert found["first_difference"] is None
    assert found["max_relative_error"] <= found["tolerance"] <= LIMIT


ACCUMULATED = {"memory": {"accumulation": 2}}


@pytest.mark.parametrize(
    ("words", "asked"),
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
def test_a_right_plan_is_proved(two: RankPool, tmp_path: Path, words: tuple[str, ...], asked: dict[str, Any]) -> None:
    assert_equal(proved(two, tmp_path, *words, **asked))


def test_every_loss_gradient_buffer_and_weight_is_checked(three: RankPool, tmp_path: Path) -> None:
    found = proved(three, tmp_path, "normalized", size=23)
    assert_equal(found)
    assert (found["ranks"], found["steps"]) == (3, 3)
    # 6 parameters and 3 buffers; weights and buffers also before the first step
    assert found["checked"] == {"losses": 3, "gradients": 18, "norms": 3, "buffers": 12, "weights": 24}
    assert json.loads(json.dumps(found)) == found
    assert list(tmp_path.glob("step-*")) == [tmp_path / "step-0000.pt"], "a step that was read leaves the disk"


def test_it_says_over_which_samples_batch_norm_took_its_statistics(two: RankPool, tmp_path: Path) -> None:
    notes = proved(two, tmp_path, "normalized", size=23, plan=ACCUMULATED)["notes"]
    assert any("BatchNorm is local (2 data ranks × 2 microbatches)" in note for note in notes)
    assert any("dropout is off" in note for note in notes)
    assert proved(two, tmp_path, "plain", optimizer="sgd")["notes"] == []


def test_a_weight_that_rounding_alone_decides_is_told(two: RankPool, tmp_path: Path) -> None:
    """Adagrad divides a gradient of 1e-17 by 1e-10: the bias before BatchNorm goes its own way under every plan."""
    found = proved(two, tmp_path, "normalized", optimizer="adagrad", size=23, plan=ACCUMULATED)
    assert_equal(found)
    assert any("rounding alone decides was taken over" in note for note in found["notes"])


def test_dropout_can_be_compared_too(two: RankPool, tmp_path: Path) -> None:
    found = proved(two, tmp_path, "normalized", size=23, plan=ACCUMULATED, dropout=True)
    assert_equal(found)
    assert any("dropout is on" in note for note in found["notes"])


def test_single_precision_has_a_wider_tolerance(two: RankPool, tmp_path: Path) -> None:
    found = proved(two, tmp_path, "normalized", optimizer="sgd", size=23, dtype="fp32")
    assert found["equal"], found["first_difference"]
    assert 1e-9 < found["max_relative_error"] < found["tolerance"] < 1e-2


# ---- faults


@pytest.mark.parametrize("factor", all_but([1 + 1e-6], [1.01, 1 + 1e-4, 1 + 1e-6, 0.5]))
def test_scaled_gradients_are_found(two: RankPool, tmp_path: Path, factor: float) -> None:
    found = proved(two, tmp_path, "normalized", size=23, plant=planted(factor))
    assert not found["equal"]
    first = found["first_difference"]
    assert (first["step"], first["what"], first["parameter"], first["cause"]) == (1, "gradient", "head.bias", "scaled")
    assert first["error"] > found["tolerance"]
    assert found["max_relative_error"] == pytest.approx(abs(factor - 1), rel=1e-3)


def test_the_parameter_and_the_step_are_named(two: RankPool, tmp_path: Path) -> None:
    plant = planted(1.0001, parameter="attention.in_proj_weight", step=2)
    first = proved(two, tmp_path, "attending", plant=plant)["first_difference"]
    assert (first["step"], first["parameter"]) == (2, "attention.in_proj_weight")


def test_a_replica_that_goes_its_own_way_is_found_at_once(two: RankPool, tmp_path: Path) -> None:
    found = proved(two, tmp_path, "plain", optimizer="sgd", plant=planted(1.001, rank=1))
    assert not found["equal"]
    first = found["first_difference"]
    assert (first["step"], first["what"], first["rank"], first["cause"]) == (1, "gradient", 1, "scaled")
    assert found["notes"][-1].startswith("nothing was compared after step 1")


# ---- many


@pytest.mark.parametrize("seed", all_but([0, 1], range(4)))
def test_random_plans_give_no_false_alarm(three: RankPool, tmp_path: Path, seed: int) -> None:
    assert_equal(three.run(prove_here, random_question(seed, 3), tmp_path)[0])


@pytest.mark.soak
def test_fifty_random_plans_give_no_false_alarm(tmp_path: Path) -> None:
    """And each of them with its gradients off by a millionth is told from a right one."""
    for size in (2, 3, 4):
        with ranks(size) as pool:
            for seed in range(100 * size, 100 * size + 17):
                asked = random_question(seed, size)
                assert_equal(pool.run(prove_here, asked, tmp_path)[0])
                spoiled = replace(asked, plant=planted(1 + 1e-6))
                assert not pool.run(prove_here, spoiled, tmp_path)[0]["equal"]


def test_a_precision_that_the_run_will_choose_is_no_hindrance() -> None:
    auto = Plan.model_validate({"axes": {"replicate": 2}, "numerics": {"precision": "auto"}})
    check_runnable(with_precision(auto, "fp64"))
    named = Plan.model_validate({"numerics": {"precision": "fp16"}})
    assert with_precision(named, "fp64") is named


@pytest.mark.parametrize("algorithm", ["native", "ring", "tree", "halving_doubling", "two_level", "shared_memory"])
def test_every_way_of_combining_gradients_is_proved(three: RankPool, tmp_path: Path, algorithm: str) -> None:
    plan = {"axes": {"replicate": 3}, "gradients": {"algorithm": algorithm, "bucket_bytes": 300}}
    told = three.run(prove_here, question("attending", plan=plan), tmp_path)[0]
    assert_equal(told)


def test_what_trains_otherwise_by_design_is_left_out_and_told(two: RankPool, tmp_path: Path) -> None:
    for name, chosen in (("powersgd_rank", 1), ("local_steps", 4)):
        plan = {"axes": {"replicate": 2}, "gradients": {name: chosen}}
        told = two.run(prove_here, question("plain", plan=plan), tmp_path)[0]
        assert_equal(told)
        assert f"compared without gradients.{name}, which trains otherwise than one device" in told["notes"]
