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
NET, DECODER, SMALL_DECODER = "perceptron 4096 6", "decoder 4 512 256 1000", "decoder 2 128 64 500"
# Models, clusters, batches, `allow` and constraints of the kinds that `problems.py` draws, apart from what takes long.
FIXED = [
    Problem(NET, "1xL4", 127, "rounding", make_constraints()),
    Problem(NET, "2xRTX4090", 7, "changes", make_constraints()),
    Problem(NET, "3xH100", 480, "rounding", make_constraints()),
    Problem(NET, "4xV100-16GB", 257, "changes", make_constraints(avoid=["compile"])),
    Problem(NET, "5xL4", 31, "same", make_constraints()),
    Problem(NET, "8xH100", 480, "changes", make_constraints({"axes.shard": 8})),
    Problem(NET, "12xA100-80GB", 96, "rounding", make_constraints(avoid=["tensor"])),
    Problem(NET, "1xRTX4090+1xL4", 64, "rounding", make_constraints()),
    Problem("perceptron 1024 4", "3xXeon-8380", 31, "rounding", make_constraints()),
    Problem("perceptron 1024 4", "2xEPYC-7763", 257, "changes", make_constraints()),
    Problem("perceptron 1024 4", "8xEPYC-7763", 512, "same", make_constraints()),
    Problem(SMALL_DECODER, "1xH200", 64, "changes", make_constraints()),
    Problem(SMALL_DECODER, "2xL4", 480, "rounding", make_constraints(max_memory="1GB")),
    Problem(SMALL_DECODER, "3xA100-80GB", 127, "changes", make_constraints()),
    Problem(DECODER, "4xA100-80GB", 31, "rounding", make_constraints()),
    Problem(DECODER, "4xH100", 256, "changes", make_constraints({"memory.recompute": "none"})),
    Problem(SMALL_DECODER, "6xRTX4090", 480, "changes", make_constraints(avoid=["shard"])),
    Problem(SMALL_DECODER, "8xV100-16GB", 8, "same", make_constraints()),
    Problem(SMALL_DECODER, "8xL4", 1024, "rounding", make_constraints({"memory.accumulation": 1})),
    Problem("images resnet18", "2xH100", 480, "rounding", make_constraints(avoid=["recompute"])),
]


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


def test_no_plan_beats_any_of_the_fixed_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 20 searches are in one test, because models are traced once. `make test-plans` runs it."""
    monkeypatch.setattr(validation.search.compare, "_relaxed", lambda *_: {})
    rows = [check_search(problem, 0, number, 8) for number, problem in enumerate(FIXED)]
    assert len(rows) == 20
    assert all(row["plans"] >= 5 for row in rows), rows
    assert not [row for row in rows if is_failure(row)]


@pytest.mark.soak
@pytest.mark.parametrize("first", [0, 10, 500, 510, 520])
def test_no_plan_beats_any_of_fifty_random_searches(first: int) -> None:
    """Those that were seen to hold. `python -m validation.search` tries others, of which a few in a hundred fail."""
    rows = [check_search(draw_problem(11, number), 11, number, 200) for number in range(first, first + 10)]
    assert not [row for row in rows if is_failure(row)]


def test_an_answer_that_a_better_cluster_makes_slower_is_a_failure() -> None:
    row = {"beaten": 0.0, "relaxed": 0.2}
    assert is_failure(row)
    assert not is_failure({**row, "relaxed": 0.0})


def test_without_an_answer_any_plan_that_fits_beats_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation.search.compare, "_answer", lambda *_: None)
    assert is_failure(check_search(replace(PROBLEM, batch=32), 0, 0, 5))
