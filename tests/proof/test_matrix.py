"""Every axis and product of axes trains the same model: proved in fp64 for the kinds of models that people train.

Each case: three steps with AdamW, weight decay and clipping that binds, a third of the targets ignored and all of them
together, and a short last batch. Then the same plan evaluates every sample, and the user's model with the trained
weights must give the same loss.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import default_collate

from meshwright.cluster.detect import find_cluster
from meshwright.parallel.check import plan_checker
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.profiles import Profiles
from meshwright.planner.search import search
from meshwright.profile.optimizer import optimizer_cost
from tests.proof.matrix import COVERING, all_cases
from tests.proof.matrix_case import TOLERANCE, Worlds, by_size, matrix_request, prove_case, prove_only
from tests.soaked import all_but
from tests.zoo import BATCH, SAMPLES, ZOO, RandomSamples

# The soak has the largest case: four ranks with three axes. Experts and context are each in another case.
LARGEST = ("mixture", "S2C2E2 ring")


@pytest.mark.parametrize(("kind", "case"), all_but(set(COVERING) - {LARGEST}, by_size(COVERING)))
def test_a_plan_trains_the_same_model(worlds: Worlds, kind: str, case: str, tmp_path: Path) -> None:
    prove_case(worlds, kind, case, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "case"), by_size(case for case in all_cases() if case not in COVERING))
def test_every_plan_trains_the_same_model(worlds: Worlds, kind: str, case: str, tmp_path: Path) -> None:
    prove_case(worlds, kind, case, tmp_path)


@pytest.mark.parametrize("schedule", all_but({"1f1b"}, ["1f1b", "zbv"]))
def test_a_last_batch_of_fewer_samples_than_microbatches(worlds: Worlds, schedule: str, tmp_path: Path) -> None:
    """The second batch, which is the last, has one sample for two microbatches."""
    request = replace(matrix_request("gpt", f"P2 {schedule}", batch=SAMPLES - 1), steps=2)
    proof = worlds(2).run(prove_only, request, tmp_path)[0]
    assert proof.equal, proof.first_difference
    assert proof.max_relative_error <= TOLERANCE


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["gpt", "resnet", "vgg"])
def test_what_the_planner_proposes_runs_and_trains_the_same_model(worlds: Worlds, kind: str, tmp_path: Path) -> None:
    """The best plan of every family, for devices with little memory and slow links between two pairs of them."""
    data = RandomSamples(ZOO[kind].data)
    sample = default_collate([data[0], data[1]])
    with torch.device("meta"):
        model = ZOO[kind].model()
    refuses = plan_checker(model, sample)
    adamw = optimizer_cost(torch.optim.AdamW(model.parameters()), on_gpu=True)
    inputs = PlanningInputs(find_cluster("2x2xV100-16GB"), BATCH, adamw, allow="same", top=6, check_plan=refuses)
    result = search(inputs, Profiles(model, sample, ZOO[kind].loss))
    plans = [priced.plan for priced in (*result.ranked, *result.family_bests)]
    assert len({plan.axes for plan in plans}) >= 4
    for plan in plans:
        proof = worlds(plan.world_size).run(prove_only, matrix_request(kind, plan), tmp_path)[0]
        assert proof.equal, f"{plan.summary()}: {proof.first_difference}"
        assert proof.max_relative_error <= TOLERANCE


def test_the_covering_set_has_every_axis_pair_and_kind() -> None:
    sizes = [case.split()[0] for _, case in COVERING]
    axes = [{letter for letter in size if letter.isalpha()} for size in sizes]
    assert {kind for kind, _ in COVERING} == set(ZOO)
    for pair in ("RS", "RT", "RP", "ST", "SP", "TP"):
        assert any(set(pair) <= letters for letters in axes), pair
