"""The bytes that a step exchanges, in closed form."""

from typing import Any

import pytest

from meshwright.plan import Plan
from meshwright.simulator.engine import Engine, find_engine
from meshwright.simulator.traffic import Exchange, exchanges
from tests.simulator.test_exchange import BATCH, HIDDEN, LAYERS, LENGTH, ONE, traced

WEIGHTS = traced().parameter_bytes


def found(engine: Engine | None = None, rank: int = 0, **groups: Any) -> tuple[Exchange, ...]:
    chosen = Plan.model_validate(groups)
    return exchanges(traced(), chosen, BATCH, engine or find_engine("meshwright"), rank)


def total(of: tuple[Exchange, ...], axis: str, collective: str) -> float:
    return sum(e.bytes * e.count for e in of if (e.axis, e.collective) == (axis, collective))


def test_one_rank_sends_nothing() -> None:
    assert found() == ()


def test_replicas_combine_each_gradient_once_a_step() -> None:
    sent = found(axes={"replicate": 4}, memory={"accumulation": 3}, gradients={"bucket_bytes": WEIGHTS // 4})
    assert sent == (Exchange("replicate", "all_reduce", WEIGHTS / 4, 4),)


@pytest.mark.parametrize(("level", "scatters", "gathers"), [
    ("parameters", 3, 6), ("gradients", 3, 1), ("optimizer", 1, 1)
])  # fmt: skip
def test_shards_gather_and_scatter_as_often_as_their_level_says(level: str, scatters: int, gathers: int) -> None:
    sent = found(axes={"shard": 4, "replicate": 2}, memory={"accumulation": 3, "sharding": level})
    assert total(sent, "shard", "reduce_scatter") == pytest.approx(scatters * WEIGHTS)
    assert total(sent, "shard", "all_gather") == pytest.approx(gathers * WEIGHTS)
    assert total(sent, "replicate", "all_reduce") == pytest.approx(WEIGHTS / 4)


def test_split_layers_exchange_in_every_microbatch() -> None:
    sent = found(axes={"tensor": 4}, modules={"loss": True}, memory={"accumulation": 3})
    # two a block and pass, the table's forward and the head's backward
    assert total(sent, "tensor", "all_reduce") == 3 * ONE * (2 * 2 * LAYERS + 2)


def test_what_crosses_a_cut_goes_there_and_back() -> None:
    shape: dict[str, Any] = {"cuts": ["blocks.1", "blocks.3"], "microbatches": 6}
    for rank, ways in ((0, 1), (1, 2), (2, 1)):
        sent = found(rank=rank, axes={"pipeline": 3}, pipeline=shape)
        assert sent == (Exchange("pipeline", "point_to_point", BATCH * LENGTH * HIDDEN * 4, 6 * ways),)


def test_engines_send_what_they_keep() -> None:
    half = found(Engine(name="half", gradient=0.5), axes={"replicate": 4})
    assert total(half, "replicate", "all_reduce") == WEIGHTS / 2
