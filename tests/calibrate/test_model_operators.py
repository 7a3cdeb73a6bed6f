"""A model's own operators, measured here: what they are told from, and whose predictions they change."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.calibrate import model_operators as own_shapes
from meshwright.calibrate.model_operators import BASED_ON, is_here, with_own_shapes
from meshwright.calibrate.operator_calls import Builder, Scene
from meshwright.cluster.cluster import Cluster, OperatorTime
from meshwright.cluster.detect import detect_cpu, find
from meshwright.plan import Axes, Compute, Plan
from meshwright.profile.tracing.trace import profile
from meshwright.profile.values import ModelProfile
from meshwright.simulator.compute.lookup import looked_up
from meshwright.simulator.compute.operator_time import operator_s, speeds

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
    return profile(model, sample, F.cross_entropy, on_gpu=False)


def _row(operator: str, **others: Any) -> OperatorTime:
    shape = {"matmul": (8, 8, 8), "convolution": (1, 8, 8, 8, 8, 3, 1, 1), "norm": (1, 8, 8, 8)}.get(operator, (64,))
    said = {"operator": operator, "dtype": "fp32", "shape": shape, "flops": 0, "bytes": 256, "seconds": 1e-6, **others}
    return OperatorTime.model_validate(said)


def _measured(*operators: OperatorTime) -> Cluster:
    """This machine, as if it had been measured."""
    cluster = detect_cpu()
    (node,) = cluster.nodes
    known = {"bandwidth_bytes_per_s": 1e9, "rates": {"fp32": 1e9}, "operators": operators}
    node = node.model_copy(update={"device": node.device.model_copy(update=known)})
    return cluster.model_copy(update={"nodes": (node,), "based_on": "measured"})


def _here() -> Cluster:
    return _measured(*(_row(operator) for operator in CLASSES))


def test_operators_are_built_as_the_model_runs_them() -> None:
    builder, scene = Builder(BATCH, biased=True), Scene(torch.device("cpu"))
    built = {}
    for stretch in _traced().stretches:
        for operator in stretch.operators:
            act = builder.build(operator, stretch.phase == "backward")
            if act is not None:
                result = act(scene)
                scene.put(result)
                built[operator.layer, operator.name] = tuple(result.shape)
    assert built["first", "convolution"] == (BATCH, 8, 16, 16)  # no padding
    assert built["second", "convolution"] == (BATCH, 16, 8, 8)
    assert built["second", "convolution_backward"] == (BATCH, 8, 16, 16)
    assert built["first", "convolution_backward"] == (8, 1, 3, 3)  # nobody asks for the gradient of data
    assert built["", "max_pool2d_with_indices"] == (BATCH, 16, 4, 4)
    assert built["", "max_pool2d_with_indices_backward"] == (BATCH, 16, 8, 8)
    assert built["head", "addmm"] == (BATCH, 16)
    assert built["", "relu"] == (BATCH, 8, 16, 16)
    norms = {shape for (_, name), shape in built.items() if "batch_norm" in name}
    assert norms == {(BATCH, 8, 16, 16)}


@pytest.mark.parametrize("threads", [1, 2])
def test_a_measured_operator_is_predicted_to_take_as_long(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    def seconds(heavy: Sequence[Any], *_: Any) -> list[float]:
        return [0.1 + 0.01 * place for place in range(len(heavy))]

    monkeypatch.setattr(own_shapes, "_on_cores", seconds)
    plan = Plan(compute=Compute(threads=threads))
    cluster = with_own_shapes(_here(), _traced(), plan, BATCH)
    prices = speeds(cluster.nodes[0].device, "fp32", threads)
    taken: dict[str, list[float]] = {}
    for stretch in _traced().stretches:
        for operator in stretch.operators:
            seconds_ = operator_s(operator, BATCH, prices, stretch.phase == "backward")
            taken.setdefault(operator.kind, []).append(seconds_)
    assert taken["convolution"] == pytest.approx([0.10, 0.13, 0.19, 0.22], rel=1e-4)  # their places among thirteen
    assert taken["matmul"] == pytest.approx([0.15, 0.16, 0.17], rel=1e-4)  # the last of the weights, as no row has it
    assert cluster.based_on == BASED_ON


def test_what_was_not_measured_keeps_its_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Own rows of one direction do not stand for operators of other sizes."""
    monkeypatch.setattr(own_shapes, "_on_cores", lambda heavy, *_: [1.0] * len(heavy))
    cluster = with_own_shapes(_here(), _traced(), Plan(), BATCH)
    prices = speeds(cluster.nodes[0].device, "fp32")
    (tiny,) = (o for s in _traced().stretches for o in s.operators if o.name == "nll_loss_forward")
    small = replace(tiny, kind="elementwise", name="mul")
    assert looked_up(small, 1, 1.0, True) is not None
    assert operator_s(small, 1, prices, True) < 1e-3


def test_this_machine_is_left_as_it_was() -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    before = _here()
    cluster = with_own_shapes(before, _traced(), Plan(axes=Axes(replicate=before.devices)), 64, budget_s=0.5)
    assert torch.equal(torch.rand(2), wanted)
    assert torch.get_num_threads() == threads
    known, now = before.nodes[0].device, cluster.nodes[0].device
    added = now.operators[len(known.operators) :]
    assert {"convolution", "matmul"} <= {row.operator for row in added}
    assert all(row.seconds > 0 for row in added)
    assert now.sources["operators"] == BASED_ON


@pytest.mark.skipif(detect_cpu().nodes[0].count < 2, reason="two ranks need two cores")
def test_ranks_wait_for_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' passes take three times as long here: so does every operator of a step that waits for them."""

    def passed(heavy: Sequence[Any], scene: Scene) -> list[float]:
        own = threading.current_thread() is threading.main_thread()
        return [1e-3 if own else 3e-3] * len(heavy)

    monkeypatch.setattr(own_shapes, "_pass", passed)
    for ranks, seconds in ((1, 1e-3), (2, 3e-3)):
        plan = Plan(axes=Axes(replicate=ranks), compute=Compute(threads=1))
        (node,) = with_own_shapes(_here(), _traced(), plan, 2 * BATCH, budget_s=0.1).nodes
        own = [row for row in node.device.operators if row.seconds != 1e-6]
        assert own
        assert [row.seconds for row in own] == pytest.approx([seconds] * len(own))


def test_only_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_shapes, "_heavy", lambda *_: pytest.fail("another machine's operators are measured here"))
    here = _here()
    (node,) = here.nodes
    others = [
        find("8xH100"),
        detect_cpu(),  # nobody has measured it
        _measured(),
        here.model_copy(update={"name": "rack"}),
        here.model_copy(update={"nodes": (node.model_copy(update={"cores": node.cores + 1}),)}),
        here.model_copy(update={"nodes": (node.model_copy(update={"number": 2}),)}),
    ]
    for cluster in others:
        assert not is_here(cluster)
        assert with_own_shapes(cluster, _traced(), Plan(), BATCH) is cluster
    assert is_here(here)


def test_an_operator_that_takes_longer_than_there_is_time_for_is_left_out() -> None:
    cluster = _here()
    assert with_own_shapes(cluster, _traced(), Plan(), BATCH, budget_s=1e-9) is cluster
