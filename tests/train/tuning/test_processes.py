"""Steps of a job are timed in a process for each rank, and what happens to a process is noticed."""

from meshwright.cluster.detect import find_cluster
from meshwright.plan import Plan
from meshwright.train.tuning.processes import ENDED, StepMeasurer
from tests.train.one_process import toy_job

CPU = find_cluster("2xcpu")
TWO = Plan.model_validate({"axes": {"replicate": 2}})


def test_ranks_are_timed_and_a_process_that_ends_is_replaced() -> None:
    """The data set has a worker: a process that ends with its parent may not start the workers of a loader."""
    bad = TWO.model_copy(update={"numerics": TWO.numerics.model_copy(update={"precision": "auto"})})
    with StepMeasurer(toy_job(data={"workers": 1}), TWO, CPU) as measurer:
        refused = measurer.measure(bad, 120)
        timings = measurer.measure(TWO, 120, finds_spread=True)
        again = measurer.measure(TWO, 120)
        measurer._running[1][0].kill()
        measurer._running[1][0].join()
        after_the_end = measurer.measure(TWO, 120)
        assert not measurer._running
        assert [timing.step_s for timing in measurer.measure(TWO, 0.0)] == [None, None], "nothing is ready at once"
        assert not measurer._running
    assert all("precision is auto" in (timing.failure or "") for timing in refused)
    assert len(timings) == 2
    for timing in timings:
        assert timing.failure is None
        assert 0 < (timing.step_s or 0) < timing.seconds
        assert len(timing.losses) == 3
        assert timing.losses == again[0].losses, "each variant starts with the same weights and batches"
    assert after_the_end[1].failure == ENDED


def test_nothing_is_started_before_the_first_measurement() -> None:
    with StepMeasurer(toy_job(), TWO, CPU) as measurer:
        assert not measurer._running
    with StepMeasurer(toy_job(), TWO, CPU, ranks=1) as measurer:
        assert len(measurer._ranks) == 1
