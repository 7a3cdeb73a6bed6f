"""Communication and launch overhead of the programs of published measurements."""

from typing import Any

import pytest

from meshwright.cluster.names import cluster_from_name
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.simulator.communication.collectives import collective_s
from meshwright.simulator.communication.exchange import gradient_exchange, transfer_s
from meshwright.simulator.communication.placement import group_of_axes
from meshwright.simulator.tensor.messages import tensor_messages
from tests.simulator.communication.test_exchange import BATCH, LAYERS, ONE, block_message_count, make_plan, traced
from tests.simulator.communication.test_schedules import MIB, cluster
from tests.simulator.test_step import step
from tests.simulator.test_traffic import step_exchanges, total_bytes, weight_bytes
from validation.engines.engine import Engine, engine_named, engines

EAGER = Engine(name="eager")


def test_an_unknown_engine_is_named_with_the_nearest() -> None:
    with pytest.raises(InputError, match="there is no engine 'megatorn': did you mean 'megatron'"):
        engine_named("megatorn")


def test_engines_run_less_than_eager_pytorch() -> None:
    eager = step().step_s
    assert step(engine_named("megatron")).step_s < eager
    assert step(Engine(name="scores", writes_scores=True)).step_s > eager
    assert all(name == engine.name for name, engine in engines().items())


def test_a_device_waits_for_a_slow_host_and_for_every_blocking_launch() -> None:
    slow = step(Engine(name="slow", launch_factor=10.0), batch=1.0)
    assert slow.breakdown["launch"] > 0
    assert step(Engine(name="no host", launch_factor=0.0), batch=1.0).breakdown["launch"] == 0
    waiting = step(Engine(name="waiting", blocks_on_launch=True), batch=512.0)
    assert waiting.breakdown["launch"] > 0, "the host waits for every operator, however long it takes"
    assert step(Engine(name="ahead"), batch=512.0).breakdown["launch"] == 0
    computing = step(Engine(name="slower too", launch_factor=10.0, attention_slowdown=2.0), batch=1.0)
    assert computing.step_s == pytest.approx(slow.step_s)


def test_sharded_ranks_send_weights_and_gradients_in_the_dtype_of_the_engine() -> None:
    cluster, plan = cluster_from_name("2x8xA100-80GB"), make_plan(axes={"shard": 16})
    whole = gradient_exchange(2**32, LAYERS, plan, cluster, EAGER)
    halves = gradient_exchange(2**32, LAYERS, plan, cluster, Engine(name="half", weight_share=0.5, gradient_share=0.5))
    assert whole.gather_s / halves.gather_s == pytest.approx(2, rel=0.1)
    assert whole.scatter_s / halves.scatter_s == pytest.approx(2, rel=0.1)


def test_all_reduced_gradients_take_longer_than_reduce_scattered_ones() -> None:
    cluster = cluster_from_name("2x8xA100-80GB")
    plan = make_plan(axes={"shard": 16}, memory={"sharding": "optimizer"})
    scattered = gradient_exchange(2**32, LAYERS, plan, cluster, EAGER)
    whole = gradient_exchange(2**32, LAYERS, plan, cluster, Engine(name="whole", all_reduces_shards=True))
    assert 1.5 < whole.scatter_s / scattered.scatter_s < 2.5
    assert whole.gather_s == scattered.gather_s


def test_tensor_ranks_that_scatter_at_cuts_send_less_between_stages() -> None:
    cluster = cluster_from_name("2x8xA100-80GB")
    plan = make_plan(axes={"tensor": 8, "pipeline": 2}, numerics={"precision": "bf16"})
    size = 2.0**30
    scattered = transfer_s(size, plan, cluster, Engine(name="scatters", scatters_at_cuts=True))
    assert scattered < transfer_s(size, plan, cluster, EAGER) / 2


def test_selective_recomputation_of_attention_alone_repeats_no_messages() -> None:
    plan = make_plan(axes={"tensor": 4}, memory={"recompute": "selective"})
    messages, _ = tensor_messages(traced(), plan, BATCH, engine_named("megatron"))
    assert block_message_count(messages, "all_reduce", False) == 2 * LAYERS


def test_a_divided_sequence_crosses_a_cut_in_parts() -> None:
    groups: dict[str, Any] = {
        "axes": {"pipeline": 2, "tensor": 4},
        "pipeline": {"cuts": ["blocks.2"], "microbatches": 2},
        "modules": {"sequence": True, "loss": True},
    }
    ours, theirs = step_exchanges(**groups), step_exchanges(engine_named("megatron-core"), **groups)
    assert (
        total_bytes(ours, "pipeline", "point_to_point")
        == 4 * total_bytes(theirs, "pipeline", "point_to_point")
        == 2 * ONE
    )
    assert total_bytes(ours, "tensor", "all_gather") - total_bytes(theirs, "tensor", "all_gather") == 2 * ONE


def test_gradients_are_sent_in_the_dtype_of_the_engine() -> None:
    half = step_exchanges(Engine(name="half", gradient_share=0.5), axes={"replicate": 4})
    assert total_bytes(half, "replicate", "all_reduce") == weight_bytes() / 2


def test_gradients_of_cpu_ranks_are_combined_by_the_backend() -> None:
    machine, replicated = cluster(1, 4), Plan(axes=Axes(replicate=4))
    replicas = group_of_axes(replicated.axes, ("replicate",), machine)
    exchange = gradient_exchange(MIB, 1, replicated, machine, engine_named("pytorch"))
    assert exchange.replicate_s == pytest.approx(collective_s("all_reduce", MIB, replicas, machine))
