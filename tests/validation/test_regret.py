"""The measurement of the chosen plan beside others: which plans it compares, that ranks run them, and its figures."""

import pytest

import meshwright as mw
from meshwright.plan import Plan
from tests.auto.machines import cpu_cluster
from validation import regret
from validation.regret import compared, measure, plans_of, synthetic_job, table


def test_the_chosen_plan_is_compared_with_those_that_people_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regret, "find_cluster", lambda *_: cpu_cluster(2))
    job = synthetic_job("linear")
    plans, predicted = plans_of(job)
    names = [plan.summary() for plan in plans]
    assert len(set(names)) == len(names) >= 6
    assert {plan.world_size for plan in plans} == {2}
    assert all(step_s > 0 for step_s in predicted.values())
    seconds = mw.launch(measure, job, plans[:2], 3, 0.01, ranks=2, device="cpu")
    assert list(seconds) == names[:2]
    assert all(len(times) == 3 and min(times) > 0 for times in seconds.values())


def test_the_regret_is_the_median_over_the_shortest_one() -> None:
    one, two = Plan(), Plan.model_validate({"axes": {"replicate": 2}})
    seconds = {one.summary(): [1.0, 1.1, 9.0], two.summary(): [0.9, 1.0, 1.1]}
    row = compared("mnist", one, seconds, {}, 1.5)
    assert row["fastest"] == two.summary()
    assert row["regret"] == pytest.approx(0.1)
    assert row["spread"] == pytest.approx(0.2)
    text = table([row])
    assert "10.0%" in text
    assert "other programs used 1.5 cores" in text
    assert compared("mnist", two, seconds, {}, 0.0)["regret"] == 0
