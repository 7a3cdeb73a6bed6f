"""Models of the kinds that users bring are proved under every axis, or refused with the reason."""

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.plan import Plan
from meshwright.proof.record.request_file import read_request, write_request
from meshwright.proof.request import ProofRequest, UserModel
from tests.proof.cases import prove_in_pool
from tests.proof.models.model_kinds import KINDS, Vectors
from tests.proof.models.test_transformers import PLANS
from tests.ranks import RankFailure, RankPool
from tests.soaked import all_but

QUICK = ("spectral norm", "symmetric", "custom function", "dataclass output", "deciding", "adapters")
# Their layers are convolutions, which are split only where a plan names them, or compute their weights from others.
WITHOUT_LAYERS_TO_SPLIT = ("timm convnext", "timm resnet", "weight norm", "spectral norm")
WITH_SEQUENCES = (
    *("lora", "lora of all layers", "lora and a whole layer", "dora", "lora in bf16"),
    *("recomputing llama", "recomputing t5"),
)


def user_model(name: str) -> UserModel:
    kind = KINDS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind.build()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    return UserModel(model, optimizer, kind.loss, kind.data, global_batch=9, clip_norm=0.5)


def prove_kind(
    rank: int, size: int, name: str, axis: str, folder: Path, recompute: str = "none"
) -> dict[str, Any] | None:
    """Runs in every rank of a pool. Returns the proof as JSON on rank 0."""
    plan = {**PLANS[axis]}
    plan["memory"] = {**plan.get("memory", {}), "recompute": recompute}
    if axis == "pipeline":
        plan["pipeline"] = {**plan["pipeline"], "cuts": [KINDS[name].cut]}
    return prove_in_pool(rank, size, ProofRequest(user_model(name), Plan.model_validate(plan)), folder)


def check_proof(pool: RankPool, *arguments: Any) -> None:
    proof = pool.run(prove_kind, *arguments)[0]
    assert proof["equal"], proof["first_difference"]
    assert proof["max_relative_error"] <= 1e-9


@pytest.mark.parametrize("axis", ["shard"])
@pytest.mark.parametrize("name", QUICK)
def test_a_model_is_proved(two: RankPool, name: str, axis: str, tmp_path: Path) -> None:
    check_proof(two, name, axis, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "axis"),
    [
        (name, axis)
        for name in KINDS
        if name != "deciding"
        for axis in PLANS
        if axis != "context" and (axis != "pipeline" or KINDS[name].cut)
        if axis != "tensor" or name not in WITHOUT_LAYERS_TO_SPLIT
    ],
)
def test_a_model_is_proved_under_every_axis(two: RankPool, name: str, axis: str, tmp_path: Path) -> None:
    check_proof(two, name, axis, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("name", WITHOUT_LAYERS_TO_SPLIT)
def test_ranks_that_would_all_compute_the_same_are_refused(two: RankPool, name: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="there is no layer to split, so its ranks would all compute the same"):
        two.run(prove_kind, name, "tensor", tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("name", WITH_SEQUENCES)
def test_a_model_is_proved_with_divided_sequences(two: RankPool, name: str, tmp_path: Path) -> None:
    check_proof(two, name, "context", tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in KINDS if name not in (*WITH_SEQUENCES, "deciding")])
def test_a_model_without_sequences_cannot_be_divided_along_them(two: RankPool, name: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"plan\.axes\.context is 2, but .*: set axes.context to 1"):
        two.run(prove_kind, name, "context", tmp_path)


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_model_that_decides_by_values_cannot_be_split_or_cut(two: RankPool, axis: str, tmp_path: Path) -> None:
    words = r"forward pass \(Deciding\), because its code depends on the values of tensors .*model_kinds\.py, line"
    with pytest.raises(RankFailure, match=words):
        two.run(prove_kind, "deciding", axis, tmp_path)


@pytest.mark.parametrize("axis", all_but({"pipeline"}, ["replicate", "pipeline"]))
def test_recomputation_does_not_iterate_spectral_norms_again(two: RankPool, axis: str, tmp_path: Path) -> None:
    check_proof(two, "spectral norm", axis, tmp_path, "full")


@pytest.mark.soak
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("axis", [axis for axis in PLANS if axis != "context"])
def test_a_model_that_recomputes_itself_can_be_recomputed_by_the_plan(
    two: RankPool, axis: str, recompute: str, tmp_path: Path
) -> None:
    check_proof(two, "recomputing llama", axis, tmp_path, recompute)


@pytest.mark.soak
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_divided_sequences_in_a_checkpoint_inside_a_checkpoint_are_refused(
    two: RankPool, recompute: str, tmp_path: Path
) -> None:
    with pytest.raises(RankFailure, match=r"a checkpoint of the model's own.*: set plan\.memory\.recompute to none"):
        two.run(prove_kind, "recomputing llama", "context", tmp_path, recompute)


@pytest.mark.parametrize("name", ["weight norm", "spectral norm", "symmetric"])
def test_a_parametrized_model_is_sent_to_the_ranks(name: str, tmp_path: Path) -> None:
    request = ProofRequest(user_model(name), Plan())
    write_request(request, tmp_path / "request")
    subject = read_request(tmp_path / "request").subject
    assert isinstance(subject, UserModel)
    assert isinstance(request.subject, UserModel)
    sent, received = request.subject.model, subject.model
    samples = torch.stack([Vectors()[index][0] for index in range(4)])
    assert torch.equal(sent(samples), received(samples))
    assert list(sent.state_dict()) == list(received.state_dict())
    # The optimizer trains the weights of the model that was received.
    assert subject.optimizer.param_groups[0]["params"][0] is next(received.parameters())
