"""Plans that compute the loss in chunks are proved, in the precision of the proofs and in their own."""

from pathlib import Path
from typing import Any

import pytest

from meshwright.plan import Plan
from tests.proof.cases import prove_in_pool
from tests.proof.matrix_case import matrix_request
from tests.ranks import RankPool
from tests.soaked import all_but

PLANS: dict[str, dict[str, Any]] = {
    "replicate": {"axes": {"replicate": 2}, "memory": {"accumulation": 2}},
    "shard": {"axes": {"shard": 2}, "memory": {"recompute": "full"}},
    "bf16": {"axes": {"shard": 2}, "numerics": {"precision": "bf16"}},
}


@pytest.mark.parametrize(
    ("kind", "plan"),
    all_but([("bert", "shard")], [(k, p) for k in ("gpt", "bert") for p in PLANS]),
)
def test_a_loss_in_chunks_is_proved(two: RankPool, tmp_path: Path, kind: str, plan: str) -> None:
    groups = {**PLANS[plan], "compute": {"loss_chunks": 3}}
    proof = two.run(prove_in_pool, matrix_request(kind, Plan.model_validate(groups)), tmp_path)[0]
    assert proof["equal"], proof["first_difference"]
