"""The fuzzer draws the same programs again, finds what differs, and finds no program that a plan trains otherwise."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.soaked import all_but
from validation.fuzz.command import distinct_rows, drawn_again, fuzz
from validation.fuzz.draw import draw_case
from validation.fuzz.fault_search import programs_until_found
from validation.fuzz.losses import LOSSES
from validation.fuzz.operators.table import OPERATORS
from validation.fuzz.plans import PLANS, axes_of
from validation.fuzz.program import Case
from validation.fuzz.rare import rarity_of
from validation.fuzz.render import is_consistent, render
from validation.fuzz.shrink import shrink
from validation.fuzz.summary import summary_lines
from validation.fuzz.training.compare import TOLERANCE, difference
from validation.fuzz.training.faults import FAULTS
from validation.fuzz.training.optimizers import OPTIMIZERS
from validation.fuzz.training.outcome import Outcome, Pools, outcome_of
from validation.fuzz.training.plain import Invalid, Training, train

CASES = sorted((Path(__file__).parents[2] / "validation/fuzz/cases").rglob("*.json"))
SEED, PROGRAMS = 0, {"make test": range(8), "soak": range(8, 14)}
SOAK_PARTS, SOAK_PROGRAMS = 11, 60


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    result = Pools()
    yield result
    result.close()


# ---- drawing


def test_a_seed_and_a_number_decide_the_case() -> None:
    assert [draw_case(3, number) for number in range(40)] == [draw_case(3, number) for number in range(40)]
    assert draw_case(3, 0) != draw_case(4, 0)
    assert draw_case(3, 0) != draw_case(3, 0, attempt=1)


def test_cases_go_through_json_and_render_as_python() -> None:
    for number in range(len(OPERATORS)):
        case = draw_case(1, number)
        assert Case.from_json(json.loads(json.dumps(case.as_json()))) == case
        assert is_consistent(case.program)
        compile(render(case), "program.py", "exec")


def test_every_operator_plan_loss_and_optimizer_is_drawn() -> None:
    cases = [draw_case(1, number) for number in range(3 * len(OPERATORS))]
    assert {name for case in cases for name in case.program.operators} == set(OPERATORS)
    assert {case.plan_kind for case in cases} == set(PLANS)
    assert {case.loss for case in cases} == set(LOSSES)
    assert {case.optimizer for case in cases} == set(OPTIMIZERS)
    assert {case.door for case in cases} == {"share", "prepare", "own loop", "two passes"}


def test_operators_and_axes_that_few_programs_had_are_drawn_more_often() -> None:
    enough = {name: {"equal": 20} for name in OPERATORS}
    axes = {axis: {"equal": 300} for name in PLANS for axis in axes_of(name)}
    few = rarity_of(
        {
            "operators": {**enough, "cumsum": {"equal": 12, "refused": 6}, "mlp": {}},
            "axes": {**axes, "branches": {"equal": 30}, "expert": {"equal": 150}},
        }
    )
    assert sorted(few.operators) == ["cumsum"] * 2 + ["mlp"] * 20
    assert few.plan_weights["branches 2"] == 8 * PLANS["branches 2"].weight
    assert few.plan_weights["shard 2 expert 2"] == 2 * PLANS["shard 2 expert 2"].weight
    assert few.plan_weights["context 2"] == PLANS["context 2"].weight
    cases = [draw_case(3, n, 0, tuple(PLANS), [few.operators[n]], few.plan_weights) for n in range(len(few.operators))]
    assert all(few.operators[number] in case.program.operators for number, case in enumerate(cases))
    assert rarity_of({"operators": enough, "axes": axes}).operator(3) is None


def test_a_row_of_results_gives_its_program_again() -> None:
    rarity = rarity_of({})
    for number in range(60):
        chosen = rarity.operators[number : number + 1] if number % 2 else ()
        case = draw_case(5, number, 1, tuple(PLANS), chosen, rarity.plan_weights)
        row = {"seed": 5, "number": number, "attempt": 1, "plan": case.plan_kind, "drawn_from": list(chosen)}
        assert drawn_again(row) == case


def test_rows_that_are_given_twice_count_once() -> None:
    rows = [{"seed": 1, "number": number, "attempt": 0, "plan": "shard 2", "outcome": "equal"} for number in (0, 1, 0)]
    other = {**rows[0], "drawn_from": ["mlp"]}  # another program of this number
    assert distinct_rows([*rows, other]) == [rows[0], rows[1], other]


@pytest.mark.soak
def test_every_operator_runs_in_plain_pytorch(tmp_path: Path) -> None:
    never_ran = set(OPERATORS)
    for number in range(3 * len(OPERATORS)):
        case = draw_case(1, number)
        if not never_ran & set(case.program.operators):
            continue
        try:
            train(case, tmp_path / "program.py")
        except Invalid:
            continue
        never_ran -= set(case.program.operators)
    assert never_ran == set()


# ---- comparing


def test_a_wrong_weight_loss_or_row_is_a_difference() -> None:
    weight = torch.tensor([[1.0, 2.0], [0.01, 0.02]], dtype=torch.float64)
    expected = Training((1.0, 0.5), {"weight": weight})
    assert difference(expected, (1.0, 0.5), {"weight": weight.clone()}) == (0.0, "weight")
    off = weight.clone()
    off[1, 0] += 1e-10  # 5e-9 of its row, but less than the tolerance of the whole tensor
    assert difference(expected, (1.0, 0.5), {"weight": off})[0] > TOLERANCE
    assert difference(expected, (1.0, 0.5 + 1e-8), {"weight": weight})[1] == "the loss of step 1"
    assert difference(expected, (1.0, 0.5), {"weight": weight, "more": weight})[0] == torch.inf
    assert difference(expected, (1.0, 0.5), {"weight": weight * torch.nan})[0] == torch.inf


def test_elements_with_gradients_that_are_only_rounding_are_not_compared() -> None:
    weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    expected = Training((1.0,), {"bias": weight}, {"bias": torch.tensor([False, True, False])})
    assert difference(expected, (1.0,), {"bias": torch.tensor([1.0, 9.0, 3.0], dtype=torch.float64)})[0] == 0
    assert difference(expected, (1.0,), {"bias": torch.tensor([1.1, 2.0, 3.0], dtype=torch.float64)})[0] > TOLERANCE


def test_the_bias_of_keys_is_the_only_part_without_gradients(tmp_path: Path) -> None:
    places = train(kept_case("keys_of_lion"), tmp_path / "program.py").rounding_only[
        "blocks.1.m1_0.self_attn.in_proj_bias"
    ]
    assert places.tolist() == [False] * 16 + [True] * 16 + [False] * 16


def test_a_failing_program_is_shrunk_to_the_statement_that_fails() -> None:
    case = next(case for number in range(1000) if len((case := draw_case(7, number)).program.operators) > 6)
    culprit = case.program.operators[-1]

    def run(smaller: Case) -> Outcome:
        return Outcome("wrong" if culprit in smaller.program.operators else "equal")

    small, outcome = shrink(case, Outcome("wrong"), run, most_runs=300)
    assert outcome.kind == "wrong"
    takes = OPERATORS[culprit]
    assert culprit in small.program.operators
    assert len(small.program.operators) <= (1 if "BLD" in takes.takes and takes.gives is None else 5)
    assert (small.loss, small.optimizer, small.door) == ("mean", "SGD", "share")


def test_a_program_that_plain_pytorch_cannot_run_does_not_count(tmp_path: Path) -> None:
    case = draw_case(1, 0, plans=["replicate 2"], operators=["view heads"])
    no_heads = replace(case.program, sizes=replace(case.program.sizes, H=5))
    assert outcome_of(replace(case, program=no_heads), Pools()).kind == "invalid"  # before any rank starts


# ---- in ranks


@pytest.mark.parametrize("programs", all_but({"make test"}, PROGRAMS))
def test_no_program_of_a_fixed_seed_is_trained_otherwise(pools: Pools, programs: str) -> None:
    plans = [name for name, kind in PLANS.items() if kind.ranks == 2]
    check(fuzz(SEED, PROGRAMS[programs], plans, (), pools))


@pytest.mark.parametrize("file", CASES, ids=lambda file: file.stem)
def test_programs_that_failed_before_are_equal_or_refused(pools: Pools, file: Path) -> None:
    outcome = outcome_of(Case.from_json(json.loads(file.read_text())["case"]), pools)
    assert outcome.kind in ("equal", "refused"), outcome.reason


def test_a_planted_fault_is_found(pools: Pools) -> None:
    assert programs_until_found("gradients are summed over data ranks", SEED, pools, most=5) is not None


@pytest.mark.soak
@pytest.mark.parametrize("part", range(SOAK_PARTS))
def test_programs_of_another_seed_in_each_part_of_the_soak(pools: Pools, part: int) -> None:
    check(fuzz(1000 + part, range(SOAK_PROGRAMS), tuple(PLANS), (), pools))


@pytest.mark.soak
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_found(pools: Pools, name: str) -> None:
    assert programs_until_found(name, SEED, pools) is not None


def kept_case(name: str) -> Case:
    file = next(file for file in CASES if file.stem == name)
    return Case.from_json(json.loads(file.read_text())["case"])


def check(results: "Iterator[tuple[Case, dict[str, object]]]") -> None:
    """Fails with the table of outcomes and the programs that differ."""
    rows, failures = [], []
    for case, row in results:
        rows.append(row)
        if row["outcome"] in ("wrong", "crash"):
            failures.append(f"{row['plan']}, {row['optimizer']}, {row['door']}: {row['reason']}\n{render(case)}")
    assert not failures, "\n".join([*failures, *summary_lines(rows)])
    assert any(row["outcome"] == "equal" for row in rows)
