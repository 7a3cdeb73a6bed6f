"""Compiled plans are proved: losses, gradients and weights are those of the uncompiled model on one device."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from meshwright.plan import Plan
from meshwright.proof.request import ProofRequest
from tests.parallel.compiler import compiled_graphs, compiling_with
from tests.proof.cases import prove_in_pool
from tests.proof.matrix_case import matrix_request
from tests.ranks import RankPool
from tests.soaked import all_but

CUTS = ["blocks.0", "blocks.1", "blocks.2"]
TWO_STAGES = {"axes": {"pipeline": 2}, "pipeline": {"cuts": CUTS[1:2], "microbatches": 2}}
TWO_RANKS: dict[str, dict[str, Any]] = {
    "replicate": {"axes": {"replicate": 2}},
    "shard": {"axes": {"shard": 2}},
    "tensor": {"axes": {"tensor": 2}},
    "pipeline": TWO_STAGES,
    "chunks": {"axes": {"replicate": 2}, "compute": {"loss_chunks": 3}},
    "recompute": {"axes": {"shard": 2}, "memory": {"recompute": "full"}},
    "accumulate": {"axes": {"replicate": 2}, "memory": {"accumulation": 2}},
}
FOUR_RANKS: dict[str, dict[str, Any]] = {
    "replicate tensor": {"axes": {"replicate": 2, "tensor": 2}},
    "shard tensor": {"axes": {"shard": 2, "tensor": 2}},
    "shard tensor recompute": {"axes": {"shard": 2, "tensor": 2}, "memory": {"recompute": "full"}},
    "tensor sequence": {"axes": {"replicate": 2, "tensor": 2}, "modules": {"sequence": True}},
    "replicate shard": {"axes": {"replicate": 2, "shard": 2}},
    "pipeline replicate": {**TWO_STAGES, "axes": {"pipeline": 2, "replicate": 2}},
    "pipeline shard": {**TWO_STAGES, "axes": {"pipeline": 2, "shard": 2}},
    "pipeline tensor": {**TWO_STAGES, "axes": {"pipeline": 2, "tensor": 2}},
    "pipeline recompute": {
        **TWO_STAGES,
        "axes": {"pipeline": 2, "replicate": 2},
        "memory": {"recompute": "full"},
    },
    "interleaved": {
        "axes": {"pipeline": 2, "replicate": 2},
        "pipeline": {"cuts": CUTS, "microbatches": 2, "schedule": "interleaved_1f1b"},
    },
    "zero bubble": {
        "axes": {"pipeline": 2, "replicate": 2},
        "pipeline": {"cuts": CUTS[1:2], "microbatches": 4, "schedule": "zero_bubble"},
    },
    "four stages": {"axes": {"pipeline": 4}, "pipeline": {"cuts": CUTS, "microbatches": 4, "schedule": "gpipe"}},
    "chunks shard": {"axes": {"replicate": 2, "shard": 2}, "compute": {"loss_chunks": 3}},
}


def prove_compiled(
    rank: int, size: int, request: ProofRequest, folder: Path, backend: str | None
) -> tuple[dict[str, Any] | None, int, list[str]]:
    """Returns the proof, the number of graphs that this rank has compiled, and its warnings about compiling, except
    that the last batch is short."""
    with compiling_with(backend), warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        proof = prove_in_pool(rank, size, request, folder)
        texts = [str(warning.message) for warning in raised if "plan.compute.compile" in str(warning.message)]
        return proof, compiled_graphs(), [text for text in texts if "different shapes" not in text]


def check_proof(pool: RankPool, groups: dict[str, Any], what: str, backend: str | None, folder: Path) -> None:
    compute = {**groups.get("compute", {}), "compile": what}
    request = matrix_request("gpt", Plan.model_validate({**groups, "compute": compute}))
    results = pool.run(prove_compiled, request, folder, backend)
    proof = results[0][0]
    assert proof["equal"], proof["first_difference"]
    assert proof["max_relative_error"] <= 1e-9
    for _, graphs, texts in results:
        assert graphs > 0
        assert texts == []


@pytest.mark.parametrize(
    ("name", "what"),
    all_but([("replicate", "blocks")], [(n, w) for n in TWO_RANKS for w in ("blocks", "model")]),
)
def test_compiled_plans_of_two_ranks_are_proved(two: RankPool, tmp_path: Path, name: str, what: str) -> None:
    check_proof(two, TWO_RANKS[name], what, "aot_eager", tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("name", TWO_RANKS)
def test_code_of_the_default_backend_is_proved(two: RankPool, tmp_path: Path, name: str) -> None:
    check_proof(two, TWO_RANKS[name], "model", None, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("what", ["blocks", "model"])
@pytest.mark.parametrize("name", FOUR_RANKS)
def test_compiled_products_of_axes_are_proved(four: RankPool, tmp_path: Path, name: str, what: str) -> None:
    check_proof(four, FOUR_RANKS[name], what, "aot_eager", tmp_path)
