"""Every axis and product of axes trains the same model: proved in fp64 for the kinds of models that people train.

Each case: three steps with AdamW, weight decay and clipping that binds, a third of the targets ignored and all of them
together, and a last batch that is short. Then the same plan evaluates every sample, and its weights go back into the
untouched model, which must say the same.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import default_collate

from meshwright.cluster.detect import find
from meshwright.parallel.check import checker
from meshwright.planner.profiles import Profiles
from meshwright.planner.question import Question as PlanQuestion
from meshwright.planner.search import search
from meshwright.profile.optimizer import cost_of
from tests.proof.matrix import COVERING, every
from tests.proof.tried import TOLERANCE, Worlds, asked, by_size, prove_case, prove_only
from tests.zoo import BATCH, SAMPLES, ZOO, Made


@pytest.mark.parametrize(("kind", "case"), by_size(COVERING))
def test_a_plan_trains_the_same_model(worlds: Worlds, kind: str, case: str, tmp_path: Path) -> None:
    prove_case(worlds, kind, case, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "case"), by_size(case for case in every() if case not in COVERING))
def test_every_plan_trains_the_same_model(worlds: Worlds, kind: str, case: str, tmp_path: Path) -> None:
    prove_case(worlds, kind, case, tmp_path)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_last_batch_of_fewer_samples_than_microbatches(worlds: Worlds, schedule: str, tmp_path: Path) -> None:
    """The second and last batch has one sample for two microbatches."""
    question = replace(asked("gpt", f"P2 {schedule}", batch=SAMPLES - 1), steps=2)
    proof = worlds(2).run(prove_only, question, tmp_path)[0]
    assert proof.equal, proof.first_difference
    assert proof.max_relative_error <= TOLERANCE


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["gpt", "resnet", "vgg"])
def test_what_the_planner_proposes_runs_and_trains_the_same_model(worlds: Worlds, kind: str, tmp_path: Path) -> None:
    """The best of every family of plans, on devices with little memory and slow links between two of four."""
    data = Made(ZOO[kind].data)
    sample = default_collate([data[0], data[1]])
    with torch.device("meta"):
        model = ZOO[kind].model()
    refuses = checker(model, sample)
    adamw = cost_of(torch.optim.AdamW(model.parameters()), on_gpu=True)
    question = PlanQuestion(find("2x2xV100-16GB"), BATCH, adamw, exact=True, top=6, refuses=refuses)
    found = search(question, Profiles(model, sample, ZOO[kind].loss))
    plans = [choice.plan for choice in (*found.ranked, *found.others)]
    assert len({plan.axes for plan in plans}) >= 4
    for plan in plans:
        proof = worlds(plan.world_size).run(prove_only, asked(kind, plan), tmp_path)[0]
        assert proof.equal, f"{plan.summary()}: {proof.first_difference}"
        assert proof.max_relative_error <= TOLERANCE


def test_the_covering_set_has_every_axis_pair_and_kind() -> None:
    sizes = [case.split()[0] for _, case in COVERING]
    axes = [{letter for letter in word if letter.isalpha()} for word in sizes]
    assert {kind for kind, _ in COVERING} == set(ZOO)
    for pair in ("RS", "RT", "RP", "ST", "SP", "TP"):
        assert any(set(pair) <= found for found in axes), pair
