"""Random kills are decided by the seed, and cover all parts of a run."""

from validation.bench.faults.schedule import plan_kills


def test_a_seed_always_plans_the_same_kills_of_all_parts_and_ranks() -> None:
    kills = plan_kills(7, 100, ranks=4, steps=200, save_every=10, evaluate_every=40)
    assert kills == plan_kills(7, 100, ranks=4, steps=200, save_every=10, evaluate_every=40)
    assert kills != plan_kills(8, 100, ranks=4, steps=200, save_every=10, evaluate_every=40)
    assert {kill.rank for kill in kills} == {0, 1, 2, 3}
    steps = [kill.step for kill in kills if kill.during not in ("start", "restart")]
    assert steps == sorted(steps)
    assert (steps[0] >= 1, steps[-1] <= 200) == (True, True)
    parts = {kill.during for kill in kills}
    assert parts == {*("start", "restart", "data", "forward", "backward", "optimizer", "save", "publish", "evaluation")}


def test_five_kills_have_one_each_in_the_rare_parts() -> None:
    for seed in range(50):
        parts = [kill.during for kill in plan_kills(seed, 5, ranks=2, steps=30, save_every=5, evaluate_every=10)]
        assert parts[0] == "start"
        assert {"save", "evaluation", "restart"} <= set(parts[1:])
        assert plan_kills(seed, 1, ranks=2, steps=30, save_every=5, evaluate_every=10)[0].during != "restart"


def test_parts_that_a_run_does_not_have_are_left_out() -> None:
    kills = plan_kills(7, 100, ranks=2, steps=9, save_every=None, evaluate_every=None)
    assert not {"save", "publish", "evaluation"} & {kill.during for kill in kills}
