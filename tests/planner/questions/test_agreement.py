"""Each row of an answer is the plan that is found if it is asked for alone; and what makes a cluster better makes no
answer worse."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.cluster.detect import find_cluster
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.offload import search_with_offload
from meshwright.planner.profiles import Profiles
from meshwright.planner.questions.answer import plan_changed_point, plan_point, priced_again
from meshwright.planner.questions.goals import Limits, best_cluster, read_clusters
from meshwright.planner.questions.sweep import sweep
from meshwright.workloads.text.decoder import Decoder, NextTokenLoss
from tests.planner.cases import images
from tests.planner.constraints.test_constraints import inputs_of, layers, tiny_decoder

TWO_NODES = "2x2xA100-80GB"


def new_layers() -> Profiles:
    """Profiles that no other search has used."""
    used = layers()
    return Profiles(used.model, used.sample, used.loss)


def new_decoder(sequence: int = 128) -> Profiles:
    with torch.device("meta"):
        model = Decoder(layers=3, hidden=512, heads=4, sequence=sequence, vocabulary=500, tied=False)
        tokens = torch.empty(2, sequence, dtype=torch.long)
    return Profiles(model, (tokens, tokens), NextTokenLoss())


def test_a_plan_is_predicted_again_where_it_can_divide_the_batch() -> None:
    even, odd = inputs_of("3xA100-80GB", 48), inputs_of("3xA100-80GB", 31)
    of_even, of_odd = (search_with_offload(inputs, layers()).ranked[0] for inputs in (even, odd))
    for priced, inputs in ((of_even, even), (of_odd, odd)):
        again = priced_again(priced, inputs, layers())
        assert again is not None
        assert (again.plan, again.prediction) == (priced.plan, priced.prediction)
    assert of_odd.plan.shares.samples
    assert priced_again(of_odd, even, layers()) is None, "its shares are those of another batch"
    assert priced_again(of_even, replace(even, global_batch=2), layers()) is None
    assert priced_again(of_even, replace(even, memory_margin=1 - 1e-9), layers()) is None


def check_row(row: dict[str, Any], inputs: PlanningInputs, profiles: Profiles) -> None:
    """Checks that a row is the plan that these inputs alone give."""
    single = search_with_offload(inputs, profiles).ranked[0]
    assert row["plan"] == single.plan.model_dump(mode="json")
    assert row["step_s"] == single.prediction.step_s
    assert row["device_bytes"] == single.needed_bytes


def check_sweep(name: str, values: list[str], make: Callable[[], Profiles], of_value: Callable[[str], Any]) -> None:
    """Checks a sweep of two machines against single searches, each with profiles of its own."""
    inputs = inputs_of(TWO_NODES, 16)
    rows = sweep(name, values, inputs, make()).values["rows"]
    assert [row["value"] for row in rows] == values
    for value, row in zip(values, rows, strict=True):
        changes = of_value(value)
        if isinstance(changes, str):
            changes = {"cluster": find_cluster(changes)}
        check_row(row, replace(inputs, **changes), make())


SWEEPS: dict[str, tuple[list[str], Callable[[str], Any]]] = {
    "nodes": (["1", "2", "4"], lambda value: f"{value}x2xA100-80GB" if value != "1" else "2xA100-80GB"),
    "link": (["200G", "400G"], lambda value: f"{TWO_NODES}@{value}"),
    "gpu": (["A100-80GB", "V100"], lambda value: f"2x2x{value}"),
    "batch": (["8", "16", "64"], lambda value: {"global_batch": int(value)}),
    "devices": (["2", "4", "8"], lambda value: f"{int(value) // 2}x2xA100-80GB" if value != "2" else "2xA100-80GB"),
}


@pytest.mark.parametrize("name", ["nodes", *(pytest.param(name, marks=pytest.mark.soak) for name in SWEEPS)])
def test_rows_of_a_sweep_are_the_plans_asked_for_alone(name: str) -> None:
    values, of_value = SWEEPS[name]
    check_sweep(name, values[:2], new_layers, of_value)


@pytest.mark.soak
@pytest.mark.parametrize("name", SWEEPS)
def test_rows_of_a_decoders_sweep_are_the_plans_asked_for_alone(name: str) -> None:
    values, of_value = SWEEPS[name]
    check_sweep(name, values, new_decoder, of_value)


@pytest.mark.soak
def test_rows_of_a_sweep_over_sequences_are_the_plans_asked_for_alone() -> None:
    inputs = inputs_of("2xA100-80GB", 16)
    values = ["64", "128"]
    answer = sweep("sequence", values, inputs, new_decoder(), (), lambda value: (inputs, new_decoder(int(value))))
    for value, row in zip(values, answer.values["rows"], strict=True):
        check_row(row, inputs, new_decoder(int(value)))


@pytest.mark.parametrize(
    "goal", ["cost", *(pytest.param(goal, marks=pytest.mark.soak) for goal in ("time", "devices"))]
)
def test_clusters_for_a_goal_have_the_plans_asked_for_alone(goal: Any) -> None:
    clusters = read_clusters("A100-80GB=2,2xA100-80GB=4")
    inputs = inputs_of("A100-80GB", 16)
    answer = best_cluster(goal, clusters, 10, Limits(), inputs, new_layers())
    for cluster, row in zip(clusters, answer.values["rows"], strict=True):
        check_row(row, replace(inputs, cluster=find_cluster(cluster.name)), new_layers())


CHANGES = ("compute", "link", "within", "memory")


@pytest.mark.soak
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(CHANGES),
    factor=st.sampled_from([1.01, 1.1, 1.5, 2, 3, 10]),
    cluster=st.sampled_from(["A100-80GB", "2xV100", TWO_NODES, "2x2xH100@100G"]),
    batch=st.sampled_from([4, 16, 64]),
    model=st.sampled_from([layers, tiny_decoder, lambda: images("resnet50")]),
)
def test_a_better_cluster_gives_no_slower_answer(
    name: str, factor: float, cluster: str, batch: int, model: Callable[[], Profiles]
) -> None:
    point = plan_point("x", inputs_of(cluster, batch), model())
    better = plan_changed_point(point, f"{name}={factor}x", model())
    assert point.best is not None
    assert better.best is not None
    assert better.step_s <= point.step_s
