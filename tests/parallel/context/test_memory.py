"""A rank of the context axis keeps the activations of its own tokens only, and needs the memory that is predicted."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find_cluster
from meshwright.launch.world import World
from meshwright.parallel.context.divide_model import SequenceDivision, divide_inputs
from meshwright.parallel.context.exchange import Exchange
from meshwright.plan import Plan
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


LENGTH, WORDS = 4_096, 258
PLANS: dict[str, dict[str, Any]] = {
    "ring": {"axes": {"context": 4}, "modules": {"attention_exchange": "ring"}},
    "all_gather": {"axes": {"context": 4}},
    "shards": {"axes": {"shard": 2, "context": 2}, "modules": {"attention_exchange": "ring"}},
}


def narrow_gpt() -> Decoder:
    return Decoder(4, 128, 4, LENGTH, WORDS, positions="rotary")


def measured_step_bytes(rank: int, size: int, plan: dict[str, Any]) -> int:
    """The most memory of the process in its third step, less what it holds after the second one: weights, gradients and
    optimizer state are allocated then."""
    torch.set_num_threads(1)
    world = World(rank, rank, size, size, 0, torch.device("cpu"), None)
    tokens = torch.arange(LENGTH).remainder(WORDS)[None]
    session = Session(
        narrow_gpt(),
        lambda parameters: torch.optim.AdamW(parameters.values()),
        loss=NextTokenLoss(),
        plan=Plan.model_validate(plan),
        world=world,
        sample=(tokens, tokens),
    )
    for _ in range(2):
        session.step((tokens, tokens))
    gc.collect()
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the kernel then measures the peak anew
    session.step((tokens, tokens))
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1_024


def cpu_cluster() -> Cluster:
    cluster = find_cluster("8xH100")
    device = cluster.nodes[0].device.model_copy(update={"kind": "cpu"})
    return cluster.model_copy(update={"nodes": (cluster.nodes[0].model_copy(update={"device": device}),)})


@pytest.mark.soak
@pytest.mark.parametrize("name", PLANS)
def test_a_rank_needs_the_predicted_memory(four: RankPool, name: str) -> None:
    plan = Plan.model_validate(PLANS[name])
    with torch.device("meta"):
        model, tokens = narrow_gpt(), torch.empty(1, LENGTH, dtype=torch.int64)
    profile = trace_profile(model, (tokens, tokens), NextTokenLoss(), with_structure=True, on_gpu=False)
    adamw = measure_optimizer_cost(torch.optim.AdamW, multi_tensor=False)
    memory = plan_memory(cpu_cluster(), profile, plan, plan.batch_parts, adamw, OUR_RUNTIME)
    held = sum(memory.breakdown[part] for part in ("weights", "optimizer state"))
    measured = max(four.run(measured_step_bytes, PLANS[name]))
    assert measured == pytest.approx(memory.allocated_bytes - held, rel=0.1)
