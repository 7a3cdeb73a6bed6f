"""The session of a job: where its initial weights are computed."""

import pytest
import torch
from torch import Tensor

from meshwright.plan import Plan
from meshwright.train import job_session
from meshwright.train.build import build_data
from tests.ranks import ranks
from tests.train.one_process import equal_states, toy_job, world

DECODER = {
    "call": "meshwright.workloads.text.decoder_sizes:decoder",
    "size": "gpt2",
    "layers": 2,
    "hidden": 16,
    "heads": 2,
}


def initial_weights(rank: int, size: int, axes: dict[str, int], on_meta: bool) -> tuple[bool, dict[str, Tensor]]:
    """Whether the model began on the meta device, and its weights after two steps."""
    tokens = {"call": "meshwright.workloads.text.tokens:tokens", "sequence": 8, "vocabulary": 40, "samples": 16}
    job = toy_job(
        model={**DECODER, "vocabulary": 40, "sequence": 8},
        data={"train": {**tokens, "split": "train"}},
        loss={"call": "meshwright.workloads.text.decoder:NextTokenLoss"},
        train={"global_batch": 8, "freeze": ["blocks.0.norm1"]},
    )
    stages = {"pipeline": {"cuts": ["blocks.0"], "microbatches": 2}} if "pipeline" in axes else {}
    plan = Plan.model_validate({"axes": axes, **stages})
    limit, job_session.LARGE_BYTES = job_session.LARGE_BYTES, 0 if on_meta else 2**30
    try:
        model, fill = job_session._build_model(job, plan, torch.device("cpu"))
        session = job_session.build_session(job, plan, world(rank, size), lambda doing: None)
    finally:
        job_session.LARGE_BYTES = limit
    for batch in session.batches(build_data(job)[0], 1, 8):
        session.step(batch)
    empty = fill is not None and all(p.is_meta for p in model.parameters())
    return empty, session.state_dict()


@pytest.mark.parametrize("axis", ["shard", "tensor", "pipeline"])
def test_a_large_model_that_is_divided_is_built_on_the_meta_device(axis: str) -> None:
    with ranks(2) as two:
        filled, built = two.run(initial_weights, {axis: 2}, True), two.run(initial_weights, {axis: 2}, False)
    for (empty, weights), (_, expected) in zip(filled, built, strict=True):
        assert empty
        assert equal_states(weights, expected)
