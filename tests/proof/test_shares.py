"""Ranks with unequal shares of a batch train the same model as one device, also if samples move between ranks in every
step; and so do ranks that hold weights, gradients and optimizer state in proportion to `shares.shards`. The cases are
those of the matrix, with a short last batch, ignored targets and clipping that binds. Its models have tied weights, and
weights with fewer rows than ranks."""

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.plan import Plan
from meshwright.proof.shrink import shrink
from tests.proof.matrix_case import Worlds, matrix_request, prove_case, prove_only
from tests.soaked import all_but

CASES = [
    ("mnist", "S2 twice uneven"),
    ("resnet", "R2 moving"),
    ("mnist", "R2 uneven"),
    ("vgg", "R2 wide uneven"),
    ("vgg", "R2 wide moving"),
    ("resnet", "R2 twice uneven"),
    ("resnet", "R2 synchronized moving"),
    ("gpt", "S2 optimizer moving"),
    ("gpt", "S2 gradients uneven"),
    ("two_tower", "R2 moving"),
    ("mixture", "R2E2 twice uneven"),
    ("mixture", "S2E2 full moving"),
    ("mnist", "S4 moving"),
    ("resnet", "R2P2 twice uneven"),
    ("gpt", "R2P2 zbv moving"),
    ("gpt", "S2P2 interleaved_1f1b uneven"),
    ("gpt", "S2C2 ring full uneven"),
    ("gpt", "R2C2 moving"),
    ("two_tower", "R2S2 twice uneven"),
    ("multitask", "R2S2 twice moving"),
    ("multitask", "R2T2 twice moving"),
    ("gpt", "S2T2 sequence loss uneven"),
    ("mixture", "R4E2 moving"),
]

SHARD_CASES = [
    ("mnist", "S2 twice shards"),
    ("gpt", "S2 optimizer twice shards"),
    ("gpt", "S2 gradients twice shards uneven"),
    ("resnet", "S2 synchronized shards"),
    ("bert", "S2 full shards"),
    ("gpt", "S2 selective twice shards moving"),
    ("multitask", "S2 gradients shards"),
    ("two_tower", "S2 twice shards"),
    ("gpt", "S3 twice shards"),
    ("mnist", "S3 optimizer twice shards uneven"),
    ("gpt", "S3 gradients twice shards"),
    ("multitask", "S3 shards"),
    ("mnist", "S4 shards moving"),
    ("gpt", "R2S2 twice shards"),
    ("gpt", "R2S2 gradients twice shards uneven"),
    ("mnist", "R2S2 optimizer twice shards"),
    ("gpt", "S2T2 sequence loss shards uneven"),
    ("bert", "S2T2 twice shards"),
    ("gpt", "S2P2 interleaved_1f1b shards uneven"),
    ("gpt", "S2P2 zbv shards"),
    ("mnist", "S2P2 twice optimizer shards"),
    ("gpt", "S2P2 gradients shards"),
]


@pytest.mark.parametrize(("kind", "case"), all_but(set(CASES[:2]), CASES))
def test_unequal_shares_train_the_same_model(worlds: Worlds, kind: str, case: str, tmp_path: Path) -> None:
    prove_case(worlds, kind, case, tmp_path)


@pytest.mark.parametrize(("kind", "case"), all_but({SHARD_CASES[0]}, SHARD_CASES))
def test_shards_in_proportion_train_the_same_model(worlds: Worlds, kind: str, case: str, tmp_path: Path) -> None:
    prove_case(worlds, kind, case, tmp_path)


@pytest.mark.soak
def test_a_rank_without_samples_of_the_last_batch(worlds: Worlds, tmp_path: Path) -> None:
    """The third batch has two samples, of which rank 1 gets none."""
    plan = Plan.model_validate({"axes": {"shard": 2}, "shares": [15, 5], "memory": {"accumulation": 2}})
    request = matrix_request("mnist", plan, batch=20)
    proof = worlds(2).run(prove_only, replace(request, steps=3), tmp_path)[0]
    assert proof.equal, proof.first_difference


def test_a_smaller_plan_keeps_the_proportions_of_its_shares() -> None:
    plan = Plan.model_validate({"axes": {"replicate": 16}, "shares": [48] * 8 + [16] * 8})
    smaller, _ = shrink(plan, 2)
    assert smaller.shares.samples == (48, 16)
    plan = Plan.model_validate({"axes": {"shard": 4, "replicate": 2}, "shares": {"shards": [3, 3, 1, 1]}})
    smaller, _ = shrink(plan, 2)
    assert (smaller.axes.shard, smaller.shares.shards) == (2, (3, 1))
