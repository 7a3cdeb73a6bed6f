"""Unedited models of the transformers library train the same with divided sequences: alone, with each other axis and
in triples, on 2, 4 and 8 ranks. Rows have 16 tokens at most and are padded, some labels are ignored, the last batch is
short and gradients are clipped. Kinds of models that are proved under more plans are in tests/proof/matrix.py."""

from pathlib import Path

import pytest

from meshwright.plan import Plan
from tests.proof.matrix import plan_with_cuts
from tests.proof.matrix_case import Worlds
from tests.proof.models.test_transformers import prove_plan
from tests.proof.models.transformers_models import CASES

WORDS = 16  # as few as 8 ranks can divide
PLANS = (
    *("C2 ring twice", "C2 full", "C4", "R2C2 ring twice", "S2C2 gradients", "C2T2 ring", "C2P2 ring"),
    *("C8 ring twice", "C8", "S2C4 ring full", "C4T2", "R2S2C2 ring", "S2C2T2", "R2C2P2 ring", "S2C2P2 ring"),
)
MODELS = ("llama", "gpt2", "bert")
# Each rank has tokens of its own, which it sends to experts of ranks with the same tokens of other samples.
MIXTURES = ("mixtral", "qwen3 mixture", "deepseek")
WITH_EXPERTS = ("R2C2E2 twice", "S2C2E2 ring", "R2C2P2E2 ring", "R2S2C2E2")
EACH: list[str] = [
    *(f"{name}: {case}" for case in PLANS for name in MODELS),
    *(f"{name}: {case}" for case in WITH_EXPERTS for name in MIXTURES),
    *(f"listed experts: {case}" for case in ("R2C2E2 twice", "R4C2E4 ring")),
    # The last stage has the table of words under the name of the head, and not the module that looks them up.
    *("bert: T2P2", "bert: C2T2P2 ring"),
]


def plan_of_model(name: str, case: str) -> Plan:
    return plan_with_cuts(case, lambda stages: (CASES[name].cut or "",))


def _world_size(case: str) -> int:
    name, plan_case = case.split(": ")
    return plan_of_model(name, plan_case).world_size


CASES_BY_SIZE: list[str] = sorted(EACH, key=_world_size)


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES_BY_SIZE)
def test_a_model_with_divided_sequences_is_proved(worlds: Worlds, case: str, tmp_path: Path) -> None:
    name, plan_case = case.split(": ")
    plan = plan_of_model(name, plan_case)
    proof = worlds(plan.world_size).run(prove_plan, name, plan.model_dump(mode="json"), tmp_path, "fp64", WORDS)[0]
    assert proof["equal"], proof["first_difference"]
    assert proof["max_relative_error"] <= 1e-9
