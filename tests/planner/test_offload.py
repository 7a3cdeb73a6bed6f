"""Plans keep tensors in CPU memory only where no other plan fits or where that is faster, and the report says why."""

from typing import Any

import pytest

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find_cluster
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.planner.explanation.explain import explain
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.offload import search_with_offload
from meshwright.simulator.predict import Prediction, predict_plan
from tests.planner.cases import ADAMW, cluster_with, small_decoder

GIB = 2**30


def inputs_of(cluster: Cluster, **conditions: Any) -> PlanningInputs:
    return PlanningInputs(cluster, 8, ADAMW, precisions=("fp32",), **conditions)


def predict(plan: dict[str, Any], cluster: Cluster) -> Prediction:
    profile = small_decoder().get("fp32", "none")
    return predict_plan(cluster, profile, Plan.model_validate(plan), 8, ADAMW)


def test_plans_that_fit_offload_nothing() -> None:
    result = search_with_offload(inputs_of(find_cluster("H100")), small_decoder())
    assert all(priced.plan.memory.offload == "none" for priced in result.ranked)
    assert result.without_offload is None


def test_optimizer_state_goes_to_cpu_memory_where_nothing_else_fits() -> None:
    inputs = inputs_of(cluster_with(memory_bytes=int(2.1 * GIB)))
    result = search_with_offload(inputs, small_decoder())
    best = result.ranked[0]
    assert {priced.plan.memory.offload for priced in result.ranked} == {"optimizer"}
    sentences = " ".join(explain(result, inputs))
    weights = small_decoder().get("fp32", "none").parameter_bytes
    assert best.prediction.memory.host_bytes == 4 * weights  # two numbers of state, copies of weight and gradient
    assert "Optimizer state is in CPU memory, because no plan fits without that. A rank needs 1.5" in sentences
    assert "copying weights and gradients from and to CPU memory" in sentences
    assert "divided by ." not in sentences


def test_shards_follow_where_optimizer_state_alone_does_not_suffice() -> None:
    inputs = inputs_of(cluster_with("2xH100", memory_bytes=int(0.825 * GIB)))
    result = search_with_offload(inputs, small_decoder())
    assert {priced.plan.memory.offload for priced in result.ranked} == {"parameters"}
    assert all(priced.plan.axes.shard > 1 for priced in result.ranked)
    assert "Optimizer state and shards of parameters are in CPU memory" in " ".join(explain(result, inputs))


def test_offload_wins_where_cpu_memory_is_nearer_than_the_other_ranks() -> None:
    """With a slow network and a very fast link to CPU memory, replicas with state in CPU memory are faster than shards
    that fit without."""
    slow = cluster_with("2x1xH100@1G", memory_bytes=int(2.4 * GIB), host_bandwidth_bytes_per_s=5e12)
    (node,) = slow.nodes
    slow = slow.model_copy(update={"nodes": (node.model_copy(update={"cores": 4000}),)})
    inputs = inputs_of(slow)
    result = search_with_offload(inputs, small_decoder())
    assert result.without_offload is not None
    best, without = result.ranked[0], result.without_offload
    assert best.plan.memory.offload == "optimizer"
    assert without.plan.memory.offload == "none"
    assert best.prediction.step_s < without.prediction.step_s
    assert f"because the best plan without that, {without.plan.summary()}, takes" in " ".join(explain(result, inputs))


@pytest.mark.parametrize("changes", [{"allow": "same"}, {"host_bandwidth_bytes_per_s": 0}])
def test_no_offload_where_it_is_not_allowed_or_not_known(changes: dict[str, Any]) -> None:
    allow = changes.pop("allow", "changes")
    inputs = inputs_of(cluster_with(memory_bytes=int(2.1 * GIB), **changes), allow=allow)
    with pytest.raises(InputError, match="the model fits no plan on 'H100'"):
        search_with_offload(inputs, small_decoder())


def test_predictions_move_tensors_and_time_to_the_cpu() -> None:
    plain, cluster = {"axes": {"shard": 2}}, find_cluster("2xH100")
    weights = small_decoder().get("fp32", "none").parameter_bytes
    without = predict(plain, cluster)
    optimizer = predict({**plain, "memory": {"offload": "optimizer"}}, cluster)
    parameters = predict({**plain, "memory": {"offload": "parameters"}}, cluster)
    assert without.memory.host_bytes == 0
    assert without.memory.breakdown["optimizer state"] == pytest.approx(weights, rel=1e-6)
    for prediction in (optimizer, parameters):
        assert prediction.memory.breakdown["optimizer state"] == 0
        assert prediction.memory_bytes < without.memory_bytes
        assert prediction.step_s > without.step_s
        assert sum(prediction.breakdown.values()) == pytest.approx(prediction.step_s)
    assert parameters.memory.breakdown["weights"] == 0
    assert parameters.memory_bytes < optimizer.memory_bytes
    device = cluster.nodes[0].device
    assert optimizer.breakdown["offload"] == pytest.approx(1.5 * weights / device.host_bandwidth_bytes_per_s)
    assert parameters.breakdown["shard"] > without.breakdown["shard"]
    assert parameters.breakdown["optimizer"] == optimizer.breakdown["optimizer"] > without.breakdown["optimizer"]


def test_offload_changes_nothing_on_cpu_ranks() -> None:
    cluster = find_cluster("2xCore")
    plan = {"axes": {"shard": 2}, "memory": {"offload": "parameters"}}
    assert predict(plan, cluster) == predict({"axes": {"shard": 2}}, cluster)


def test_an_unknown_bandwidth_is_said() -> None:
    plan = {"memory": {"offload": "optimizer"}}
    with pytest.raises(InputError, match="between a H100 and CPU memory is not known: give host_bandwidth_bytes_per_s"):
        predict(plan, cluster_with(host_bandwidth_bytes_per_s=0))
