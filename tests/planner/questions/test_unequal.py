"""Questions about machines that are not alike: those that can be answered agree with single plans."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from meshwright.cluster.detect import find_cluster
from meshwright.errors import InputError
from meshwright.plan_fields.constraints import make_constraints
from meshwright.planner.explanation.unequal import unequal
from meshwright.planner.offload import search_with_offload
from meshwright.planner.questions.goals import Limits, best_cluster, read_clusters
from meshwright.planner.questions.largest_batch import largest_batches
from meshwright.planner.questions.sweep import sweep
from meshwright.planner.questions.variations import changed, varied
from tests.planner.constraints.test_constraints import inputs_of
from tests.planner.questions.test_agreement import check_row, new_decoder, new_layers

UNEQUAL = "2xA100-40GB+2xV100"


@pytest.mark.parametrize(("name", "value"), [("devices", "2"), ("nodes", "2"), ("gpu", "H100")])
def test_what_cannot_be_swept_on_unequal_machines(name: str, value: str) -> None:
    with pytest.raises(InputError, match=rf"^sweep {name}={value}: the machines of '2xA100-40GB\+2xV100' differ, and"):
        varied(inputs_of(UNEQUAL, 16), name, value)


def test_all_machines_are_changed() -> None:
    cluster = find_cluster(UNEQUAL)
    assert [node.device.memory_bytes for node in changed(cluster, "memory=141GB").nodes] == [141e9, 141e9]
    faster = [node.device.bandwidth_bytes_per_s for node in changed(cluster, "compute=2x").nodes]
    assert faster == [2 * node.device.bandwidth_bytes_per_s for node in cluster.nodes]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "values", "of_value"),
    [
        ("batch", ["16", "64"], lambda value: {"global_batch": int(value)}),
        ("link", ["100G", "400G"], lambda value: {"cluster": find_cluster(f"2xA100-40GB@{value}+2xV100@{value}")}),
    ],
)
def test_rows_of_a_sweep_are_the_plans_asked_for_alone(
    name: str, values: list[str], of_value: Callable[[str], dict[str, Any]]
) -> None:
    inputs = inputs_of(UNEQUAL, 64)
    answer = sweep(name, values, inputs, new_decoder(), ["link=2x", "memory=141GB", "compute=2x"])
    for number, value in enumerate(values):
        row = answer.values["rows"][number]
        check_row(row, replace(inputs, **of_value(value)), new_decoder())
        assert all(change["rows"][number]["step_s"] <= row["step_s"] for change in answer.values["what_if"])


@pytest.mark.soak
def test_a_sweep_over_sequences() -> None:
    inputs = inputs_of(UNEQUAL, 16)
    values = ["64", "128"]
    answer = sweep("sequence", values, inputs, new_decoder(), (), lambda value: (inputs, new_decoder(int(value))))
    for value, row in zip(values, answer.values["rows"], strict=True):
        check_row(row, inputs, new_decoder(int(value)))


@pytest.mark.soak
def test_the_largest_batch_and_the_best_cluster() -> None:
    inputs = inputs_of(UNEQUAL, 16)
    profiles = new_layers()
    assert all(
        largest.global_batch > 16
        for largest in largest_batches(search_with_offload(inputs, profiles), inputs, profiles)
    )
    clusters = read_clusters(f"2xA100-40GB=2,{UNEQUAL}=3")
    answer = best_cluster("time", clusters, 10, Limits(), inputs, new_layers())
    for cluster, row in zip(clusters, answer.values["rows"], strict=True):
        check_row(row, replace(inputs, cluster=find_cluster(cluster.name)), new_layers())


@pytest.mark.soak
def test_the_report_says_why_shares_are_equal() -> None:
    for fixed, reason in (
        ({"axes.replicate": 4}, "would not be shorter by more than the error of predictions (5% of the time"),
        (
            {"gradients.local_steps": 4},
            "could not be run: shares.samples is [2, 1, 1, 1], but gradients.local_steps is 4",
        ),
    ):
        inputs = inputs_of(UNEQUAL, 16, constraints=make_constraints(fixed))
        result = search_with_offload(inputs, new_layers())
        assert reason in unequal(result.ranked[0], result.summary, inputs)[-1]
