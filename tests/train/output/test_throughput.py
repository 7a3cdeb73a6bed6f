"""Speed counts training alone: neither the first step's warm-up nor evaluations and checkpoints."""

from collections.abc import Iterator

import pytest

from meshwright.train.output import throughput as meter_module
from meshwright.train.output.throughput import ThroughputMeter, describe_wait


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(meter_module, "time", clock)
    return clock


def step(meter: ThroughputMeter, clock: Clock, seconds: float, samples: int = 10) -> None:
    clock.now += seconds
    meter.step(samples)


def test_the_first_step_is_warm_up(clock: Clock) -> None:
    meter = ThroughputMeter()
    step(meter, clock, 100)
    assert meter.end_window() is None
    step(meter, clock, 2)
    assert meter.end_window() == 5
    assert (meter.samples_per_s, meter.step_s) == (5, 2)


def test_pauses_do_not_count(clock: Clock) -> None:
    meter = ThroughputMeter()
    for _ in range(3):
        step(meter, clock, 1)
    meter.pause()
    clock.now += 1000
    step(meter, clock, 50)  # starts the clock again
    step(meter, clock, 1)
    meter.end_window()
    assert (meter.samples_per_s, meter.step_s) == (10, 1)


def test_a_step_is_the_median_and_the_rate_is_over_all(clock: Clock) -> None:
    meter = ThroughputMeter()
    step(meter, clock, 1)
    for seconds in (1, 1, 10):
        step(meter, clock, seconds)
        meter.end_window()
    assert meter.step_s == 1
    assert meter.samples_per_s == 30 / 12


def test_nothing_measured_is_not_zero() -> None:
    assert ThroughputMeter().samples_per_s is None
    assert ThroughputMeter().step_s is None


def test_waiting_for_data_is_a_share_of_the_measured_time(clock: Clock) -> None:
    meter = ThroughputMeter()

    def slow_loader() -> Iterator[int]:
        for batch in range(4):
            clock.now += 3
            yield batch

    assert meter.loader_share is None
    for _ in meter.waiting(slow_loader()):
        step(meter, clock, 1)
    meter.end_window()
    assert meter.loader_share == 9 / 12, "the first step is not measured"
    assert "75% of the training time was spent waiting for data: raise data.workers (now 2)" in str(
        describe_wait(meter.loader_share, 2)
    )
    assert describe_wait(0.05, 2) is None
