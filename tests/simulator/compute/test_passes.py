"""The predicted time of forward and backward passes and of optimizer steps."""

from dataclasses import replace

import pytest

from meshwright.cluster.cluster import Device
from meshwright.profile.optimizer import OptimizerCost
from meshwright.profile.values import BatchPolynomial, ModelProfile, Operator, TraceSegment
from meshwright.simulator.compute.operator_time import device_speeds, operator_s, reference_gpu
from meshwright.simulator.compute.passes import operator_launch_s, optimizer_s, pass_s
from meshwright.simulator.runtime import OUR_RUNTIME, Runtime

SGD = OptimizerCost(state_ratio=1.0, temporary_ratio=0.0, multi_tensor=True)
ADAMW = OptimizerCost(state_ratio=2.0, temporary_ratio=2.0, multi_tensor=True)
FUSED = OptimizerCost(state_ratio=2.0, temporary_ratio=0.0, multi_tensor=True)


def _device() -> Device:
    return reference_gpu()[0]


def _operator(name: str, elements: float) -> Operator:
    return Operator(
        "a",
        name,
        "elementwise",
        "float32",
        BatchPolynomial(0, 0),
        BatchPolynomial(0, 8.0 * elements),
        (BatchPolynomial(0, elements),),
    )


def _profile(operators: tuple[Operator, ...], blocks: tuple[str, ...] = ()) -> ModelProfile:
    segments = (TraceSegment("", "forward", blocks, operators, ()), TraceSegment("", "backward", blocks, operators, ()))
    return ModelProfile("fp32", (), 0, BatchPolynomial(0, 0), segments, (2, 3, 5))


def test_a_segment_counts_for_each_of_its_blocks() -> None:
    prices, operators = device_speeds(_device(), "fp32"), (_operator("relu", 1e6), _operator("gelu", 1e6))
    one_block_s, _ = pass_s(_profile(operators), "forward", 4, prices, False)
    three, _ = pass_s(_profile(operators, ("x", "y", "z")), "forward", 4, prices, False)
    assert one_block_s == pytest.approx(sum(operator_s(o, 4, prices, False) for o in operators))
    assert three == pytest.approx(3 * one_block_s)


def test_small_operators_are_limited_by_launch_overhead_and_large_ones_are_not() -> None:
    prices = device_speeds(_device(), "fp32")

    def busy_and_waiting_s(elements: float) -> tuple[float, float]:
        profile = _profile((_operator("relu", elements),) * 50)
        forward_s, forward_operators = pass_s(profile, "forward", 1, prices, False)
        backward_s, backward_operators = pass_s(profile, "backward", 1, prices, False)
        launch_s = (forward_operators + backward_operators) * operator_launch_s(_device())
        return forward_s + backward_s, OUR_RUNTIME.host_wait_s(launch_s, forward_s + backward_s)

    busy_s, waiting_s = busy_and_waiting_s(10)
    assert busy_s + waiting_s > 100 * _device().launch_s
    assert waiting_s > busy_s
    assert busy_and_waiting_s(1e9)[1] == 0


def test_casts_have_less_launch_overhead_than_layers() -> None:
    prices = device_speeds(_device(), "fp32")
    _, layers = pass_s(_profile((_operator("relu", 10),) * 10), "backward", 1, prices, False)
    _, casts = pass_s(_profile((_operator("_to_copy", 10),) * 10), "backward", 1, prices, False)
    assert casts < layers == 10


def test_an_optimizer_of_many_passes_takes_longer_than_a_fused_one() -> None:
    prices, size = device_speeds(_device(), "bf16"), 4e9
    sgd, adamw, fused = (optimizer_s(size, 100, kind, _device(), prices) for kind in (SGD, ADAMW, FUSED))
    assert fused == pytest.approx(7 * size / _device().bandwidth_bytes_per_s)
    assert 2 * fused < adamw < 5 * fused
    assert sgd < adamw
    assert optimizer_s(0.0, 0, ADAMW, _device(), prices) == 0


class _SlowHost(Runtime):
    """A runtime whose host takes twice as long to start operators."""

    def host_wait_s(self, launch_s: float, device_s: float = 0.0) -> float:
        return super().host_wait_s(2 * launch_s, device_s)


def test_an_optimizer_of_single_tensors_is_limited_by_launch_overhead_or_by_memory() -> None:
    """On a GPU many small tensors take as long as the launch of their operators."""
    prices = device_speeds(_device(), "bf16")
    single_tensor = OptimizerCost(
        state_ratio=2.0, temporary_ratio=3.0, multi_tensor=False, operators_per_parameter=12.0, traffic_ratio=29.0
    )
    small, twice_as_many = (optimizer_s(4e3 * count, count, single_tensor, _device(), prices) for count in (100, 200))
    assert twice_as_many == pytest.approx(2 * small)
    assert optimizer_s(4e5, 100, single_tensor, _device(), prices, _SlowHost()) == pytest.approx(2 * small)
    assert optimizer_s(4e5, 100, replace(single_tensor, waits_for_device=False), _device(), prices) < small / 2, (
        "the host has run ahead"
    )
    large = optimizer_s(4e10, 100, single_tensor, _device(), prices)
    assert large > 29 * 4e10 / _device().bandwidth_bytes_per_s
    assert large > optimizer_s(4e10, 100, ADAMW, _device(), prices)
