"""The speed of a GPU is measured on the device, which the host runs ahead of."""

import pytest
import torch

from meshwright.train.shares.step_clock import DeviceClock

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_device_with_more_work_for_a_sample_is_slower() -> None:
    clock, matrix = DeviceClock(), torch.randn(4096, 4096, device="cuda")
    speeds = []
    for products in (20, 40):
        for step in range(6):
            clock.begin()
            clock.mark("prepare")
            clock.mark("forward")
            for _ in range(products):
                matrix @ matrix
            clock.mark("backward")
            clock.mark("backward")  # of another microbatch, which is not measured
            clock.end(8, 8, counts=step > 1)
        speeds.append(clock.take_speed())
    assert speeds[0] > speeds[1] > 0
    assert clock.take_speed() == 0
