"""Models that compute their loss themselves are proved under every axis, without a loss in job or call."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from meshwright.errors import InputError
from meshwright.model_io.batch import WHOLE_BATCH
from meshwright.parallel.check import check_plan
from meshwright.plan import Plan
from meshwright.proof.request import ProofRequest, UserModel
from tests.proof.cases import prove_in_pool
from tests.proof.models.transformers_models import CASES, LENGTH, Samples
from tests.ranks import RankFailure, RankPool
from tests.soaked import all_but

PLANS: dict[str, dict[str, Any]] = {
    "replicate": {"axes": {"replicate": 2}, "memory": {"accumulation": 2}},
    "shard": {"axes": {"shard": 2}},
    "context": {"axes": {"context": 2}, "modules": {"attention_exchange": "ring"}},
    "tensor": {"axes": {"tensor": 2}},
    "pipeline": {"axes": {"pipeline": 2}, "pipeline": {"microbatches": 2}},
}


def prove_model(
    rank: int, size: int, name: str, axis: str, folder: Path, cut: str | None = None, dtype: str = "fp64"
) -> dict[str, Any] | None:
    """Runs in every rank of a pool. Returns the proof as JSON on rank 0."""
    plan = {**PLANS[axis]}
    if axis == "pipeline":
        plan["pipeline"] = {**plan["pipeline"], "cuts": [cut or CASES[name].cut]}
    return prove_plan(rank, size, name, plan, folder, dtype)


def prove_plan(
    rank: int, size: int, name: str, plan: dict[str, Any], folder: Path, dtype: str = "fp64", words: int = LENGTH
) -> dict[str, Any] | None:
    """The same for any plan, and for rows of this many words."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = CASES[name].build()
    user_model = UserModel(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        loss=None,
        data=Samples(CASES[name].samples, words),
        global_batch=9,
        clip_norm=0.5,
    )
    return prove_in_pool(rank, size, ProofRequest(user_model, Plan.model_validate(plan), dtype=dtype), folder)


# Encoder-decoders, which have no cut here, have tests of their own below.
EACH = [f"{name}: {axis}" for name in CASES for axis in PLANS if axis != "pipeline" or CASES[name].cut]
EACH.remove("listed experts: tensor")  # has nothing to split that is worth it
EACH = [case for case in EACH if not case.startswith(("balanced", "unused", "decoder"))]  # test_experts.py
QUICK = {"llama: tensor", "llama: context", "t5: replicate"}


NOT_DIVIDED = {"vit": r"no input of the model holds sequences"}  # what the context axis refuses


@pytest.mark.parametrize("case", all_but(QUICK, EACH))
def test_a_model_with_its_own_loss_is_proved(two: RankPool, case: str, tmp_path: Path) -> None:
    name, axis = case.split(": ")
    if axis == "context" and name in NOT_DIVIDED:
        with pytest.raises(RankFailure, match=NOT_DIVIDED[name]):
            two.run(prove_model, name, axis, tmp_path)
        return
    proof = two.run(prove_model, name, axis, tmp_path)[0]
    assert proof["equal"], proof["first_difference"]
    assert proof["max_relative_error"] <= 1e-9


@pytest.mark.soak
@pytest.mark.parametrize("axis", PLANS)
def test_experts_are_also_proved_with_their_grouped_product_in_fp32(two: RankPool, axis: str, tmp_path: Path) -> None:
    proof = two.run(prove_model, "mixtral", axis, tmp_path, None, "fp32")[0]
    assert proof["equal"], proof["first_difference"]
    assert not any("eager" in note for note in proof["notes"])


@pytest.mark.soak
def test_an_encoder_decoder_is_cut_in_its_encoder(two: RankPool, tmp_path: Path) -> None:
    proof = two.run(prove_model, "t5", "pipeline", tmp_path, "encoder.block.0")[0]
    assert proof["equal"], proof["first_difference"]
    assert proof["max_relative_error"] <= 1e-9


@pytest.mark.parametrize(
    ("name", "cut", "words"),
    [
        (
            "t5",
            "decoder.block.0",
            "block.0 computes a value that depends on no weight .* nearest cuts are after",
        ),
        ("whisper", "model.encoder.layers.0", "chance or data decide which modules of this model run in training"),
    ],
)
def test_models_that_cannot_be_cut_are_refused_before_ranks_start(name: str, cut: str, words: str) -> None:
    samples = Samples(CASES[name].samples)
    plan = Plan.model_validate({"axes": {"pipeline": 2}, "pipeline": {"cuts": [cut], "microbatches": 2}})
    with pytest.raises(InputError, match=words):
        check_plan(plan, CASES[name].build(), default_collate([samples[0], samples[1]]), WHOLE_BATCH)
