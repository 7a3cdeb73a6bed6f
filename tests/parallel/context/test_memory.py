"""A rank of the context axis keeps the activations of its own tokens only, and needs the memory that is predicted."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find_cluster
from meshwright.parallel.context.divide_model import SequenceDivision, divide_inputs
from meshwright.parallel.context.exchange import Exchange
from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.profile.optimizer import measure_optimizer_cost
from meshwright.profile.structure.sequence import SequenceInput
from meshwright.profile.tracing.trace import trace_profile
from meshwright.simulator.predict import plan_memory
from meshwright.simulator.runtime import OUR_RUNTIME
from meshwright.train.session import Session
from meshwright.workloads.text.decoder import Decoder, NextTokenLoss
from tests.parallel.context.test_attention import context_group
from tests.ranks import RankPool
from tests.soaked import all_but


def saved_bytes(model: Decoder, tokens: Tensor) -> int:
    """The bytes of all tensors that a forward pass and its loss save for the backward pass, except parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, int] = {}
    kept: list[Tensor] = []  # a freed address could be used again

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        NextTokenLoss()(model(tokens), tokens)
    return sum(storages.values())


def share_of_one_rank(rank: int, ranks: int, exchange: Exchange, length: int) -> float:
    model = Decoder(2, 32, 2, length, 50, positions="rotary")
    tokens = torch.arange(length).remainder(50)[None]
    whole = saved_bytes(model, tokens)
    inputs = [SequenceInput("tokens", 1, length)]
    divide_inputs(model, SequenceDivision(model, inputs, context_group(ranks), exchange))
    return saved_bytes(model, tokens) / whole


@pytest.mark.parametrize("exchange", all_but({"ring"}, ["all_gather", "ring"]))
def test_four_ranks_keep_about_a_quarter_each(four: RankPool, exchange: Exchange) -> None:
    assert max(four.run(share_of_one_rank, exchange, 4_096)) < 0.3


@pytest.mark.soak
def test_four_ranks_keep_about_a_quarter_each_of_32768_tokens(four: RankPool) -> None:
    assert max(four.run(share_of_one_rank, "ring", 32_768)) < 0.3


WORDS = 258
RING = {"attention_exchange": "ring"}
# By name: the plan, the length of sequences, and the layers, the width, the heads and the key-value heads of a GPT.
CASES: dict[str, tuple[dict[str, Any], int, tuple[int, int, int, int]]] = {
    "ring": ({"axes": {"context": 4}, "modules": RING}, 4_096, (4, 128, 4, 4)),
    "all_gather": ({"axes": {"context": 4}}, 4_096, (4, 128, 4, 4)),
    "shards": ({"axes": {"shard": 2, "context": 2}, "modules": RING}, 4_096, (4, 128, 4, 4)),
    "grouped heads, ring": ({"axes": {"context": 4}, "modules": RING}, 6_144, (2, 256, 8, 2)),
    "grouped heads, all_gather": ({"axes": {"context": 4}}, 6_144, (2, 256, 8, 2)),
}


def narrow_gpt(name: str) -> tuple[Decoder, Tensor]:
    """The model, and a batch of one sample."""
    _, length, (layers, width, heads, kv_heads) = CASES[name]
    model = Decoder(layers, width, heads, length, WORDS, kv_heads=kv_heads, positions="rotary")
    return model, torch.arange(length).remainder(WORDS)[None]


def measured_step_bytes(rank: int, size: int, name: str) -> int:
    """The most bytes of all tensors in a step, with weights and optimizer state."""
    torch.set_num_threads(1)
    world = World(rank, rank, size, size, 0, torch.device("cpu"), None)
    model, tokens = narrow_gpt(name)
    session = Session(
        model,
        lambda parameters: torch.optim.AdamW(parameters.values(), foreach=False),
        loss=NextTokenLoss(),
        plan=Plan.model_validate(CASES[name][0]),
        world=world,
        sample=(tokens, tokens),
    )
    session.step((tokens, tokens))  # makes the state of the optimizer
    tracker = MemTracker()
    tracker.track_external(session.module, session.optimizer)
    with tracker:
        session.step((tokens, tokens))
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def cpu_cluster() -> Cluster:
    cluster = find_cluster("8xH100")
    device = cluster.nodes[0].device.model_copy(update={"kind": "cpu"})
    return cluster.model_copy(update={"nodes": (cluster.nodes[0].model_copy(update={"device": device}),)})


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_a_rank_needs_the_predicted_memory(four: RankPool, name: str) -> None:
    plan = Plan.model_validate(CASES[name][0])
    with torch.device("meta"):
        model, tokens = narrow_gpt(name)
    profile = trace_profile(model, (tokens, tokens), NextTokenLoss(), with_structure=True, on_gpu=False)
    adamw = measure_optimizer_cost(torch.optim.AdamW, multi_tensor=False)
    memory = plan_memory(cpu_cluster(), profile, plan, plan.batch_parts, adamw, OUR_RUNTIME)
    measured = max(four.run(measured_step_bytes, name))
    assert memory.allocated_bytes - memory.copy_bytes == pytest.approx(measured, rel=0.1)
