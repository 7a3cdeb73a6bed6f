"""For plans on this machine the model's operators are measured on it; plans for other machines measure nothing."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find_cluster
from meshwright.plan import Plan
from meshwright.plan_fields.effects import Numerics
from meshwright.planner import measured_search as planning
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.measured_search import with_measured_operators
from meshwright.planner.profiles import Profiles
from meshwright.planner.questions.answer import plan_point
from meshwright.profile.values import ModelProfile
from tests.auto.machines import cpu_cluster
from tests.planner.cases import MOMENTUM, one_layer


def test_every_precision_is_measured_as_a_replica_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, str, int]] = []

    def measured(cluster: Cluster, profile: ModelProfile, plan: Plan, global_batch: int, _: float) -> Cluster:
        seen.append((plan.numerics.precision, plan.axes.replicate, profile.precision, global_batch))
        return cluster.model_copy(update={"name": "measured"})

    monkeypatch.setattr(planning, "is_this_machine", lambda cluster: True)
    monkeypatch.setattr(planning, "measure_model_operators", measured)
    inputs = PlanningInputs(find_cluster("2xH100"), 8, MOMENTUM, precisions=("bf16", "fp32"))
    assert with_measured_operators(inputs, one_layer()).cluster.name == "measured"
    assert seen == [("bf16", 2, "bf16", 8), ("fp32", 2, "fp32", 8)]


@pytest.mark.parametrize(
    ("allow", "cluster", "cores", "precision", "kernels"),
    [
        ("same", "2xH100", 16, "fp32", ["contiguous"]),
        ("rounding", "2xH100", 16, "fp32", ["contiguous", "channels_last"]),
        ("changes", "2xH100", 16, "bf16", ["channels_last"]),
        ("same", "2xcpu", 2, "fp32", ["contiguous"]),
        ("rounding", "2xcpu", 2, "fp32", ["contiguous", "channels_last", "nnpack"]),
        ("rounding", "2xcpu", 16, "fp32", ["contiguous", "channels_last"]),
    ],
)
def test_images_are_measured_with_the_layouts_and_kernels_that_the_search_considers(
    allow: Numerics, cluster: str, cores: int, precision: str, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []

    def measured(cluster: Cluster, _: ModelProfile, plan: Plan, *__: object) -> Cluster:
        seen.append((plan.numerics.precision, plan.compute.image_kernels))
        return cluster

    monkeypatch.setattr(planning, "is_this_machine", lambda cluster: True)
    monkeypatch.setattr(planning, "measure_model_operators", measured)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    profiles = Profiles(model, (torch.zeros(2, 1, 4, 4), torch.zeros(2, dtype=torch.long)), F.cross_entropy)
    named = find_cluster(cluster)
    machine = named.model_copy(update={"nodes": (named.nodes[0].model_copy(update={"cores": cores}),)})
    with_measured_operators(PlanningInputs(machine, 8, MOMENTUM, allow=allow), profiles)
    assert seen == [(precision, kernel) for kernel in kernels]


def test_another_machine_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: Any) -> Cluster:
        return pytest.fail("another machine's operators are measured here")

    monkeypatch.setattr(planning, "measure_model_operators", nothing)
    inputs = PlanningInputs(find_cluster("2xH100"), 8, MOMENTUM)
    assert with_measured_operators(inputs, one_layer()) is inputs


def test_operators_of_a_plan_that_seems_fastest_are_measured_before_it_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plans with microbatches seem twice as fast as they are until they are measured."""
    plans = [Plan.model_validate({"memory": {"accumulation": count}}) for count in (4, 2, 1)]
    measured: list[int] = []

    def search(inputs: Any, _: Any) -> Any:
        seconds = {count: 1.0 if count in (1, *measured) else 0.5 / count for count in (4, 2, 1)}
        ranked = sorted(plans, key=lambda plan: (seconds[plan.microbatches], plan.microbatches))
        priced = [SimpleNamespace(plan=plan) for plan in ranked]
        return SimpleNamespace(ranked=priced, summary=SimpleNamespace(sequence_length=0))

    def measure(cluster: Cluster, _: Any, plan: Plan, *__: Any) -> Cluster:
        measured.append(plan.microbatches)
        return cluster

    monkeypatch.setattr(planning, "search_with_offload", search)
    monkeypatch.setattr(planning, "measure_model_operators", measure)
    monkeypatch.setattr(planning, "with_measured_operators", lambda inputs, *_: inputs)
    inputs = PlanningInputs(find_cluster("cpu"), 8, MOMENTUM)

    def best_plan(inputs: PlanningInputs) -> Plan | None:
        best = plan_point("1", inputs, one_layer()).best  # of a question, whose points are single plans
        return best.plan if best else None

    monkeypatch.setattr(planning, "is_this_machine", lambda _: True)
    assert best_plan(inputs) == plans[-1]
    assert measured == [4, 2]
    monkeypatch.setattr(planning, "is_this_machine", lambda _: False)
    measured.clear()
    assert best_plan(inputs) == plans[0]
    assert measured == []


class ThroughNumpy(nn.Module):
    """Reads values through numpy, which has no bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        out: torch.Tensor = self.head(hidden / float(abs(hidden.detach().numpy()).mean()))
        return out


@pytest.mark.parametrize(("model", "precisions"), [(ThroughNumpy(), ("fp32",)), (nn.Linear(8, 2), ("bf16", "fp32"))])
def test_a_precision_in_which_the_model_fails_is_left_out(
    model: nn.Module, precisions: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(planning, "is_this_machine", lambda cluster: True)
    monkeypatch.setattr(planning, "measure_model_operators", lambda cluster, *_: cluster)
    profiles = Profiles(model, (torch.randn(4, 8), torch.zeros(4, dtype=torch.long)), F.cross_entropy, on_gpu=False)
    inputs = PlanningInputs(cpu_cluster(1), 4, MOMENTUM, precisions=("bf16", "fp32"))
    result, found = planning.measured_search(inputs, profiles)
    assert found.precisions == precisions
    assert result.ranked[0].plan.numerics.precision in precisions
    left_out = [str(one.message) for one in recwarn if "left out" in str(one.message)]
    assert len(left_out) == (precisions == ("fp32",))
