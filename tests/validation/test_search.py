"""The comparison of the search with other plans draws the same problems again, and finds an answer that is too slow."""

from dataclasses import replace
from random import Random

import pytest

import validation.search.compare
from meshwright.plan_fields.constraints import make_constraints
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.profiles import Profiles
from validation.search.__main__ import summary
from validation.search.compare import Rival, check_search, is_failure, rivals
from validation.search.problems import Problem, draw_problem

PROBLEM = Problem("perceptron 256 3", "4xH100", 64, "rounding", make_constraints())


def test_a_problem_is_drawn_again_by_its_number() -> None:
    problems = [draw_problem(3, number, ready=False) for number in range(30)]
    assert problems == [draw_problem(3, number, ready=False) for number in range(30)]
    assert len({problem.cluster for problem in problems}) > 5
    assert any(problem.constraints for problem in problems)


def test_rivals_fit_and_can_run() -> None:
    inputs, profiles = PROBLEM.inputs()
    found = list(rivals(inputs, profiles, None, 20, Random(0)))
    kinds = {tuple(rival.plan.axes.factors) for rival in found}
    assert {("replicate",), ("shard",), ("replicate", "shard")} <= kinds
    for rival in found:
        inputs.check_plan(rival.plan)
        assert rival.prediction.memory.device_bytes <= inputs.capacity_bytes
        assert rival.plan.stays_within("rounding")


@pytest.mark.parametrize("slower", [1.0, 1.5])
def test_a_slow_answer_is_a_failure(monkeypatch: pytest.MonkeyPatch, slower: float) -> None:
    """The fastest of all rivals is an answer that nothing beats; one that takes longer is beaten."""

    def answer(inputs: PlanningInputs, profiles: Profiles) -> Rival:
        best = min(rivals(inputs, profiles, None, 10, Random("0/0/plans")), key=lambda rival: rival.prediction.step_s)
        if slower == 1:
            return best
        others = rivals(inputs, profiles, None, 10, Random("0/0/plans"))
        return next(rival for rival in others if rival.prediction.step_s > slower * best.prediction.step_s)

    monkeypatch.setattr(validation.search.compare, "_answer", answer)
    monkeypatch.setattr(validation.search.compare, "_relax", lambda inputs, _: ("nothing", inputs))
    row = check_search(PROBLEM, 0, 0, 10)
    assert is_failure(row) == (slower > 1)
    assert "1 searches" in summary([row])


@pytest.mark.parametrize(
    "problem",
    [
        Problem("perceptron 1024 4", "3xXeon-8380", 31, "rounding", make_constraints()),
        Problem("decoder 4 512 256 1000", "4xA100-80GB", 31, "rounding", make_constraints()),
        Problem("images resnet18", "2xH100", 480, "rounding", make_constraints(avoid=["recompute"])),
    ],
    ids=Problem.describe,
)
def test_no_plan_beats_the_search(monkeypatch: pytest.MonkeyPatch, problem: Problem) -> None:
    monkeypatch.setattr(validation.search.compare, "_relaxed", lambda *_: {})
    row = check_search(problem, 0, 0, 30)
    assert row["plans"] > 10
    assert not is_failure(row), row


def test_an_answer_that_a_better_cluster_makes_slower_is_a_failure() -> None:
    row = {"beaten": 0.0, "relaxed": 0.2}
    assert is_failure(row)
    assert not is_failure({**row, "relaxed": 0.0})


def test_without_an_answer_any_plan_that_fits_beats_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation.search.compare, "_answer", lambda *_: None)
    assert is_failure(check_search(replace(PROBLEM, batch=32), 0, 0, 5))
