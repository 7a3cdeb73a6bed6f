"""The operators of one model, measured on this machine: how calls are built, and which predictions change."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.calibrate import model_operators
from meshwright.calibrate.model_operators import BASED_ON, is_this_machine, measure_model_operators
from meshwright.calibrate.operator_calls import CallBuilder, OperatorCall, TensorPool
from meshwright.cluster.cluster import Cluster, OperatorTime
from meshwright.cluster.detect import detect_cpu, find_cluster
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes, Compute
from meshwright.profile.tracing.trace import trace_profile
from meshwright.profile.values import ModelProfile, Operator
from meshwright.simulator.compute.lookup import classify_operator
from meshwright.simulator.compute.operator_time import device_speeds, operator_s

BATCH = 8
CLASSES = ("matmul", "convolution", "elementwise", "pooling", "norm", "reduction")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False), nn.Linear(16 * 16, 16)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(images)).relu()
        return self.head(F.max_pool2d(self.second(x), 2).flatten(1))


def _traced() -> ModelProfile:
    with torch.device("meta"):
        model, sample = Small(), (torch.zeros(2, 1, 18, 18), torch.zeros(2, dtype=torch.long))
    return trace_profile(model, sample, F.cross_entropy, on_gpu=False)


def _row(operator: str, **others: Any) -> OperatorTime:
    shape = {"matmul": (8, 8, 8), "convolution": (1, 8, 8, 8, 8, 3, 1, 1), "norm": (1, 8, 8, 8)}.get(operator, (64,))
    row = {"operator": operator, "dtype": "fp32", "shape": shape, "flops": 0, "bytes": 256, "seconds": 1e-6, **others}
    return OperatorTime.model_validate(row)


def _measured(*operators: OperatorTime) -> Cluster:
    """Returns this machine with measured rates and these operators."""
    cluster = detect_cpu()
    (node,) = cluster.nodes
    rates = {"bandwidth_bytes_per_s": 1e9, "rates": {"fp32": 1e9}, "operators": operators}
    node = node.model_copy(update={"device": node.device.model_copy(update=rates)})
    return cluster.model_copy(update={"nodes": (node,), "based_on": "measured"})


def _here() -> Cluster:
    return _measured(*(_row(operator) for operator in CLASSES))


def test_operators_are_built_as_the_model_runs_them() -> None:
    builder, pool = CallBuilder(BATCH, fuses_bias=True), TensorPool(torch.device("cpu"))
    shapes = {}
    for segment in _traced().segments:
        for operator in segment.operators:
            call = builder.build(operator, segment.phase == "backward")
            if call is not None:
                result = call(pool)
                pool.store(result)
                shapes[operator.layer, operator.name] = tuple(result.shape)
    assert shapes["first", "convolution"] == (BATCH, 8, 16, 16)  # no padding
    assert shapes["second", "convolution"] == (BATCH, 16, 8, 8)
    assert shapes["second", "convolution_backward"] == (BATCH, 8, 16, 16)
    assert shapes["first", "convolution_backward"] == (8, 1, 3, 3)  # data needs no gradient
    assert shapes["", "max_pool2d_with_indices"] == (BATCH, 16, 4, 4)
    assert shapes["", "max_pool2d_with_indices_backward"] == (BATCH, 16, 8, 8)
    assert shapes["head", "addmm"] == (BATCH, 16)
    assert shapes["", "relu"] == (BATCH, 8, 16, 16)
    norms = {shape for (_, name), shape in shapes.items() if "batch_norm" in name}
    assert norms == {(BATCH, 8, 16, 16)}


def test_the_convolutions_of_a_plan_with_nnpack_are_measured_and_predicted_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed: list[list[str]] = []

    def seconds(calls: Sequence[Any], *_: Any) -> list[float]:
        with torch.profiler.profile() as profile, torch.no_grad():
            for call in calls:
                call.call(TensorPool(torch.device("cpu")))
        timed.append([event.key for event in profile.key_averages()])
        return [1e-3 * len(timed)] * len(calls)

    monkeypatch.setattr(model_operators, "_time_on_cores", seconds)
    cluster, profile = _here(), _traced()
    for kernels in ("default", "nnpack"):
        plan = Plan(compute=Compute.model_validate({"convolutions": kernels, "threads": 1}))
        cluster = measure_model_operators(cluster, profile, plan, BATCH)
    assert ["aten::_nnpack_spatial_convolution" in names for names in timed] == [
        False,
        torch.backends.nnpack.is_available(),
    ]
    (operator,) = (o for s in profile.segments for o in s.operators if (o.layer, o.name) == ("first", "convolution"))
    for kernels, expected in (("contiguous", 1e-3), ("nnpack", 2e-3)):
        speeds = device_speeds(cluster.nodes[0].device, "fp32", 1, kernels)
        assert operator_s(operator, BATCH, speeds, False) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_measured_operator_is_predicted_to_take_as_long(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    def seconds(calls: Sequence[Any], *_: Any) -> list[float]:
        return [0.1 + 0.01 * index for index in range(len(calls))]

    monkeypatch.setattr(model_operators, "_time_on_cores", seconds)
    plan = Plan(compute=Compute(threads=threads))
    cluster = measure_model_operators(_here(), _traced(), plan, BATCH)
    operator_speeds = device_speeds(cluster.nodes[0].device, "fp32", threads)
    predicted: dict[str, list[float]] = {}
    for segment in _traced().segments:
        for operator in segment.operators:
            seconds_ = operator_s(operator, BATCH, operator_speeds, segment.phase == "backward")
            predicted.setdefault(operator.kind, []).append(seconds_)
    assert predicted["convolution"] == pytest.approx([0.10, 0.13, 0.19, 0.22], rel=1e-4)  # by index of the call
    assert predicted["matmul"] == pytest.approx([0.15, 0.16, 0.17], rel=1e-4)  # the last is the weight gradient
    assert cluster.based_on == BASED_ON


def test_an_operator_that_was_not_measured_keeps_its_predicted_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the model's shapes in a class that was not calibrated do not price operators of other sizes."""
    monkeypatch.setattr(model_operators, "_time_on_cores", lambda calls, *_: [1.0] * len(calls))
    cluster = measure_model_operators(_here(), _traced(), Plan(), BATCH)
    operator_speeds = device_speeds(cluster.nodes[0].device, "fp32")
    (tiny,) = (o for s in _traced().segments for o in s.operators if o.name == "nll_loss_forward")
    small = replace(tiny, kind="elementwise", name="mul")
    assert classify_operator(small, 1, 1.0, True) is not None
    assert operator_s(small, 1, operator_speeds, True) < 1e-3


def test_measuring_leaves_threads_and_random_numbers_as_they_were() -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    before = _here()
    cluster = measure_model_operators(
        before, _traced(), Plan(axes=Axes(replicate=before.device_count)), 64, budget_s=0.5
    )
    assert torch.equal(torch.rand(2), expected)
    assert torch.get_num_threads() == threads
    calibrated, device = before.nodes[0].device, cluster.nodes[0].device
    added = device.operators[len(calibrated.operators) :]
    assert {"convolution", "matmul"} <= {row.operator for row in added}
    assert all(row.seconds > 0 for row in added)
    assert device.sources["operators"] == BASED_ON


@pytest.mark.skipif(detect_cpu().nodes[0].count < 2, reason="two ranks need two cores")
def test_ranks_wait_for_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes of the other rank take three times as long here, and so does every operator of a step that waits for
    it."""

    def run_pass(calls: Sequence[Any], pool: TensorPool) -> list[float]:
        is_first_rank = threading.current_thread() is threading.main_thread()
        return [1e-3 if is_first_rank else 3e-3] * len(calls)

    monkeypatch.setattr(model_operators, "_run_pass", run_pass)
    for ranks, seconds in ((1, 1e-3), (2, 3e-3)):
        plan = Plan(axes=Axes(replicate=ranks), compute=Compute(threads=1))
        (node,) = measure_model_operators(_here(), _traced(), plan, 2 * BATCH, budget_s=0.1).nodes
        added = [row for row in node.device.operators if row.seconds != 1e-6]
        assert added
        assert [row.seconds for row in added] == pytest.approx([seconds] * len(added))


def test_only_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_operators, "_slowest_operators", lambda *_: pytest.fail("another machine"))
    this_machine = _here()
    (node,) = this_machine.nodes
    others = [
        find_cluster("8xH100"),
        detect_cpu(),  # not measured
        _measured(),
        this_machine.model_copy(update={"name": "rack"}),
        this_machine.model_copy(update={"nodes": (node.model_copy(update={"cores": node.cores + 1}),)}),
        this_machine.model_copy(update={"nodes": (node.model_copy(update={"number": 2}),)}),
    ]
    for cluster in others:
        assert not is_this_machine(cluster)
        assert measure_model_operators(cluster, _traced(), Plan(), BATCH) is cluster
    assert is_this_machine(this_machine)


def test_an_operator_that_takes_longer_than_the_budget_is_left_out() -> None:
    cluster = _here()
    assert measure_model_operators(cluster, _traced(), Plan(), BATCH, budget_s=1e-9) is cluster


def test_a_model_that_was_measured_before_keeps_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = iter(range(1, 100))
    monkeypatch.setattr(model_operators, "_time_on_cores", lambda calls, *_: [float(next(passes))] * len(calls))
    plan, profile = Plan(), _traced()
    first = measure_model_operators(_here(), profile, plan, BATCH)
    assert measure_model_operators(_here(), profile, plan, BATCH) == first
    assert measure_model_operators(_here(), profile, plan, 2 * BATCH) != first
    measured_again = _measured(*(_row(operator, seconds=2e-6) for operator in CLASSES))
    assert next(passes) == 3
    measure_model_operators(measured_again, profile, plan, BATCH)
    assert next(passes) == 5, "after the machine was measured again, so is the model"


def test_times_that_other_programs_disturbed_are_marked_and_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, used = iter(range(1, 100)), iter([1.5, 0.5, 0.0])
    is_idle = [False]
    monkeypatch.setattr(model_operators, "_time_on_cores", lambda calls, *_: [float(next(passes))] * len(calls))
    monkeypatch.setattr(model_operators.OtherPrograms, "cores", lambda _: next(used))
    monkeypatch.setattr(model_operators, "is_idle_now", lambda: is_idle[0])
    plan, profile = Plan(), _traced()
    first = measure_model_operators(_here(), profile, plan, BATCH)
    assert first.busy_cores == 1.5
    assert measure_model_operators(_here(), profile, plan, BATCH) == first
    is_idle[0] = True
    second = measure_model_operators(_here(), profile, plan, BATCH)
    assert (second.busy_cores, next(passes)) == (0.5, 3)
    third = measure_model_operators(_here(), profile, plan, BATCH)
    assert (third.busy_cores, next(passes)) == (0.0, 5)
    assert measure_model_operators(_here(), profile, plan, BATCH) == third
    disturbed = _here().model_copy(update={"busy_cores": 0.7})
    assert measure_model_operators(disturbed, profile, plan, BATCH).busy_cores == 0.7


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_operator_that_cannot_run_alone_is_not_measured(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    if detect_cpu().nodes[0].count < ranks:
        pytest.skip("two ranks need two cores")

    def build(builder: CallBuilder, operator: Operator, backward: bool) -> OperatorCall | None:
        if operator.layer == "second":
            raise ZeroDivisionError
        return fail if operator.kind == "matmul" else original(builder, operator, backward)

    def fail(_: TensorPool) -> torch.Tensor:
        raise RuntimeError("Kernel size can't be greater than actual input size")

    original = CallBuilder.build
    monkeypatch.setattr(CallBuilder, "build", build)
    plan = Plan(axes=Axes(replicate=ranks), compute=Compute(threads=1))
    for _ in range(2):  # measured, and then read from the stored measurements
        (node,) = measure_model_operators(_here(), _traced(), plan, BATCH * ranks, budget_s=0.1).nodes
        measured = {row.operator for row in node.device.operators if row.seconds != 1e-6}
        assert "convolution" in measured
        assert "matmul" not in measured


def test_convolutions_whose_filters_are_larger_than_the_image_run() -> None:
    """A product of two negative sides would be the right number of pixels, but there is no such image."""
    model = nn.Sequential(nn.Conv2d(4, 4, 7, padding=3), nn.Conv2d(4, 4, 7, 2, padding=3, groups=4), nn.Flatten())
    sample = (torch.zeros(2, 4, 2, 2), torch.zeros(2, dtype=torch.long))
    profile = trace_profile(model, sample, F.cross_entropy, on_gpu=False)
    builder, pool = CallBuilder(BATCH, fuses_bias=True), TensorPool(torch.device("cpu"))
    calls = [builder.build(o, s.phase == "backward") for s in profile.segments for o in s.operators]
    shapes = [tuple(call(pool).shape) for call in calls if call is not None]
    assert (BATCH, 4, 2, 2) in shapes
