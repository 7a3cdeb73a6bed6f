"""Models that compute their loss themselves are proved under every axis, without a loss in job or call."""

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.plan import Plan
from meshwright.proof.request import ProofRequest, UserModel
from tests.proof.cases import prove_in_pool
from tests.proof.models.transformers_models import CASES, Samples
from tests.ranks import RankFailure, RankPool
from tests.soaked import all_but

PLANS: dict[str, dict[str, Any]] = {
    "replicate": {"axes": {"replicate": 2}, "memory": {"accumulation": 2}},
    "shard": {"axes": {"shard": 2}},
    "tensor": {"axes": {"tensor": 2}},
    "pipeline": {"axes": {"pipeline": 2}, "pipeline": {"microbatches": 2}},
}


def prove_model(
    rank: int, size: int, name: str, axis: str, folder: Path, cut: str | None = None
) -> dict[str, Any] | None:
    """Runs in every rank of a pool. Returns the proof as JSON on rank 0."""
    plan = {**PLANS[axis]}
    if axis == "pipeline":
        plan["pipeline"] = {**plan["pipeline"], "cuts": [cut or CASES[name].cut]}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = CASES[name].build()
    user_model = UserModel(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        loss=None,
        data=Samples(CASES[name].samples),
        global_batch=9,
        clip_norm=0.5,
    )
    return prove_in_pool(rank, size, ProofRequest(user_model, Plan.model_validate(plan)), folder)


# Encoder-decoders, which have no cut here, have tests of their own below.
EACH = [f"{name}: {axis}" for name in CASES for axis in PLANS if axis != "pipeline" or CASES[name].cut]
QUICK = {"llama: replicate", "llama: tensor", "llama: pipeline", "bert: shard", "t5: replicate", "mixtral: shard"}


@pytest.mark.parametrize("case", all_but(QUICK, EACH))
def test_a_model_with_its_own_loss_is_proved(two: RankPool, case: str, tmp_path: Path) -> None:
    name, axis = case.split(": ")
    if name == "mixtral" and axis in ("tensor", "pipeline"):
        # Experts in their eager form, which fp64 needs, choose rows by values.
        with pytest.raises(RankFailure, match=r"cannot be traced in model\.layers\.0\.mlp\.experts"):
            two.run(prove_model, name, axis, tmp_path)
        return
    proof = two.run(prove_model, name, axis, tmp_path)[0]
    assert proof["equal"], proof["first_difference"]
    assert proof["max_relative_error"] <= 1e-9


@pytest.mark.soak
def test_an_encoder_decoder_is_cut_in_its_encoder(two: RankPool, tmp_path: Path) -> None:
    proof = two.run(prove_model, "t5", "pipeline", tmp_path, "encoder.block.0")[0]
    assert proof["equal"], proof["first_difference"]
    assert proof["max_relative_error"] <= 1e-9


@pytest.mark.soak
def test_a_decoder_whose_layers_share_tensors_is_not_cut(two: RankPool, tmp_path: Path) -> None:
    words = r"decoder\.block\.1 needs a tensor that an earlier pipeline stage computes .* put the cut somewhere else"
    with pytest.raises(RankFailure, match=words):
        two.run(prove_model, "t5", "pipeline", tmp_path, "decoder.block.0")
