"""Branches on different ranks train the same model. A rank holds only the weights of its branches, and checkpoints load
under other plans."""

from pathlib import Path
from typing import Any

import pytest

from meshwright.plan import Plan
from meshwright.proof.prove import prove_in_running_ranks
from meshwright.proof.reference.reference_setup import default_dtype
from tests.parallel.branches.branch_plans import BRANCHES, branch_plan
from tests.parallel.zoo_sessions import check_checkpoints_move, zoo_session
from tests.proof.matrix_case import TOLERANCE, data_in_dtype, matrix_request, one_device_loss
from tests.ranks import RankPool
from tests.soaked import all_but
from tests.train.one_process import world
from tests.zoo import BATCH, ZOO, TwoTowers


def prove_and_evaluate(rank: int, size: int, kind: str, plan: Plan, folder: Path) -> dict[str, Any]:
    """Returns the proof, which only rank 0 has, the metrics of an evaluation, the whole weights, and the names of the
    parameters that this rank holds."""
    proof = prove_in_running_ranks(matrix_request(kind, plan), world(rank, size), folder)
    session, setup = zoo_session(kind, plan, rank, size)
    with default_dtype(setup.dtype):
        session.step(next(session.batches(data_in_dtype(setup), 1, BATCH)))
        metrics = session.evaluate(data_in_dtype(setup), batch=10)
        state = session.state_dict()
    return {
        "proof": proof.to_dict() if proof else None,
        "metrics": metrics,
        "state": state,
        "parameters": [name for name, _ in session.module.named_parameters()],
    }


def check_plan_is_proved(pool: RankPool, kind: str, plan: Plan, folder: Path) -> None:
    results = pool.run(prove_and_evaluate, kind, plan, folder)
    proof = results[0]["proof"]
    assert proof["equal"], proof["first_difference"]
    assert proof["max_relative_error"] <= TOLERANCE
    assert proof["steps"] == 3
    names = [name for name, _ in ZOO[kind].model().named_parameters()]
    for rank, result in enumerate(results):
        assert result["metrics"]["loss"] == pytest.approx(one_device_loss(kind, result["state"]), rel=TOLERANCE)
        remote = [f"{branch}." for branch, owner in BRANCHES[kind].items() if owner != rank % 2]
        assert result["parameters"] == [name for name in names if not name.startswith(tuple(remote))]


@pytest.mark.parametrize("kind", all_but({"two_tower"}, BRANCHES))
def test_branches_train_the_same_model(two: RankPool, kind: str, tmp_path: Path) -> None:
    check_plan_is_proved(two, kind, branch_plan(kind, {}), tmp_path)


@pytest.mark.parametrize(
    ("axis", "kind"),
    all_but([], [(axis, kind) for axis in ("replicate", "shard") for kind in BRANCHES]),
)
def test_branches_combine_with_other_axes_and_accumulation(
    four: RankPool, kind: str, axis: str, tmp_path: Path
) -> None:
    check_plan_is_proved(four, kind, branch_plan(kind, {axis: 2}, {"accumulation": 2}), tmp_path)


@pytest.mark.soak
def test_recomputed_branches_train_the_same_model(two: RankPool, tmp_path: Path) -> None:
    check_plan_is_proved(two, "two_tower", branch_plan("two_tower", {}, {"recompute": "full"}), tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("kind", BRANCHES)
def test_checkpoints_move_between_plans(two: RankPool, kind: str, tmp_path: Path) -> None:
    plan = branch_plan(kind, {})
    check_checkpoints_move(two, kind, plan, plan, tmp_path)


def train_with_all_branches_on_rank_1(rank: int, size: int) -> tuple[int, list[str]]:
    """Trains two steps of two towers that are both on rank 1. Returns the number of parameters of this rank, and the
    names of all weights."""
    plan = Plan.model_validate({"axes": {"tensor": 2}, "modules": {"branches": {"query": 1, "document": 1}}})
    session, setup = zoo_session("two_tower", plan, rank, size)
    batches = session.batches(data_in_dtype(setup), 1, BATCH)
    with default_dtype(setup.dtype):
        session.step(next(batches))
        session.step(next(batches))
        return len(list(session.module.parameters())), list(session.state_dict())


def test_a_rank_may_have_no_parameters(two: RankPool) -> None:
    names = list(TwoTowers().state_dict())
    assert two.run(train_with_all_branches_on_rank_1) == [(0, names), (len(names), names)]
