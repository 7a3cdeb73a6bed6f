"""Seconds of passes and optimizer steps."""

from dataclasses import replace

import pytest

from meshwright.profile.optimizer import OptimizerCost
from meshwright.profile.values import Growth, ModelProfile, Operator, Stretch
from meshwright.simulator.compute.operator_time import operator_s, reference_gpu, speeds
from meshwright.simulator.compute.passes import microbatch_s, optimizer_s, pass_s

DEVICE = reference_gpu()[0]
SGD = OptimizerCost(state=1.0, temporary=0.0, at_once=True)
ADAMW = OptimizerCost(state=2.0, temporary=2.0, at_once=True)
FUSED = OptimizerCost(state=2.0, temporary=0.0, at_once=True)


def _operator(name: str, elements: float) -> Operator:
    return Operator(
        "a", name, "elementwise", "float32", Growth(0, 0), Growth(0, 8.0 * elements), (Growth(0, elements),)
    )


def _profile(operators: tuple[Operator, ...], blocks: tuple[str, ...] = ()) -> ModelProfile:
    stretches = (Stretch("", "forward", blocks, operators, ()), Stretch("", "backward", blocks, operators, ()))
    return ModelProfile("fp32", (), 0, Growth(0, 0), stretches, (2, 3, 5))


def test_a_stretch_counts_for_each_of_its_blocks() -> None:
    prices, operators = speeds(DEVICE, "fp32"), (_operator("relu", 1e6), _operator("gelu", 1e6))
    one, _ = pass_s(_profile(operators), "forward", 4, prices, False)
    three, _ = pass_s(_profile(operators, ("x", "y", "z")), "forward", 4, prices, False)
    assert one == pytest.approx(sum(operator_s(o, 4, prices, False) for o in operators))
    assert three == pytest.approx(3 * one)


def test_small_operators_wait_for_their_host_and_large_ones_do_not() -> None:
    prices = speeds(DEVICE, "fp32")
    small = microbatch_s(_profile((_operator("relu", 10),) * 50), 1, DEVICE, prices)
    large = microbatch_s(_profile((_operator("relu", 1e9),) * 50), 1, DEVICE, prices)
    assert small.total_s > 100 * DEVICE.launch_s
    assert small.waiting_s > small.forward_s + small.backward_s
    assert large.waiting_s == 0


def test_casts_take_the_host_less_than_layers() -> None:
    prices = speeds(DEVICE, "fp32")
    _, layers = pass_s(_profile((_operator("relu", 10),) * 10), "backward", 1, prices, False)
    _, casts = pass_s(_profile((_operator("_to_copy", 10),) * 10), "backward", 1, prices, False)
    assert casts < layers == 10


def test_an_optimizer_of_many_passes_takes_longer_than_a_fused_one() -> None:
    prices, size = speeds(DEVICE, "bf16"), 4e9
    sgd, adamw, fused = (optimizer_s(size, 100, kind, DEVICE, prices) for kind in (SGD, ADAMW, FUSED))
    assert fused == pytest.approx(7 * size / DEVICE.bandwidth_bytes_per_s)
    assert 2 * fused < adamw < 5 * fused
    assert sgd < adamw
    assert optimizer_s(0.0, 0, ADAMW, DEVICE, prices) == 0


def test_an_optimizer_of_single_tensors_waits_for_its_host_or_for_memory() -> None:
    """On a GPU; many small tensors take as long as their operators take to be started."""
    prices = speeds(DEVICE, "bf16")
    alone = OptimizerCost(state=2.0, temporary=3.0, at_once=False, operators=12.0, moved=29.0)
    small, more = (optimizer_s(4e3 * tensors, tensors, alone, DEVICE, prices) for tensors in (100, 200))
    assert more == pytest.approx(2 * small)
    assert optimizer_s(4e5, 100, alone, DEVICE, prices, launch=2.0) == pytest.approx(2 * small)
    assert optimizer_s(4e5, 100, replace(alone, waits=False), DEVICE, prices) < small / 2, "the host has run ahead"
    large = optimizer_s(4e10, 100, alone, DEVICE, prices)
    assert large > 29 * 4e10 / DEVICE.bandwidth_bytes_per_s
    assert large > optimizer_s(4e10, 100, ADAMW, DEVICE, prices)
