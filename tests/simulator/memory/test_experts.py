"""Ranks that divide experts need as much memory as predicted, with nearly even routing and if one rank gets all tokens.

The bytes of all tensors of a training step are tracked on CPU ranks. The prediction is that of the busiest rank, at the
load that its experts have: the tokens that they get, as a multiple of the even share."""

from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.profile.optimizer import measure_optimizer_cost
from meshwright.profile.tracing.trace import trace_profile
from meshwright.simulator.experts import at_load
from meshwright.simulator.memory.device_memory import CPU_MEMORY
from meshwright.simulator.memory.peak import predict_memory
from meshwright.train.session import Session
from meshwright.workloads.text.decoder import Decoder, NextTokenLoss
from tests.ranks import RankPool

WORDS, LENGTH, BATCH, EXPERTS = 128, 64, 16, 4
PLANS: dict[str, dict[str, Any]] = {
    "R2E2": {"axes": {"replicate": 2, "expert": 2}},
    "S2E2": {"axes": {"shard": 2, "expert": 2}},
    "R2E2 full": {"axes": {"replicate": 2, "expert": 2}, "memory": {"recompute": "full"}},
}


def decoder() -> Decoder:
    experts = {"number": EXPERTS, "top_k": 2}
    return Decoder(3, 64, 4, LENGTH, WORDS, positions="rotary", activation="swiglu", feedforward=96, experts=experts)


def measure(rank: int, size: int, plan: dict[str, Any], skewed: bool) -> tuple[int, float]:
    """The largest number of bytes in a step, and the largest load of this rank's experts."""
    torch.manual_seed(0)
    model = decoder()
    if skewed:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith("router.weight"):  # equal scores: all tokens choose the first two experts
                    weight.zero_()
    session = Session(
        model,
        # Routers stay as they are: with a rate of 0, only the state of the optimizer changes.
        lambda parameters: torch.optim.AdamW(parameters.values(), lr=0.0, foreach=False),
        loss=NextTokenLoss(),
        plan=Plan.model_validate(plan),
        world=World(rank, rank, size, size, 0, torch.device("cpu"), None),
        sample=(torch.zeros(2, LENGTH, dtype=torch.long),) * 2,
    )
    draw = torch.Generator().manual_seed(rank)
    tokens = torch.randint(WORDS, (BATCH // size, LENGTH), generator=draw)
    session.step((tokens, tokens))  # makes the state of the optimizer
    loads = session.parallel.expert_loads
    assert loads is not None
    loads.take_rows()
    tracker = MemTracker()
    tracker.track_external(session.module, session.optimizer)
    with tracker:
        session.step((tokens, tokens))
    rows = loads.take_rows().values()
    load = max(computed / routed for routed, computed in rows)
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"], load


def predict(plan: dict[str, Any], load: float) -> int:
    parsed = Plan.model_validate(plan)
    with torch.device("meta"):
        model, tokens = decoder(), torch.zeros(2, LENGTH, dtype=torch.long)
    profile = trace_profile(model, (tokens, tokens), NextTokenLoss(), recompute=parsed.memory.recompute, on_gpu=False)
    adam = measure_optimizer_cost(lambda parameters: torch.optim.AdamW(parameters), multi_tensor=False)
    prediction = predict_memory(at_load(profile, load), parsed, BATCH / parsed.batch_parts, adam, CPU_MEMORY)
    return prediction.allocated_bytes - prediction.copy_bytes


@pytest.mark.soak
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_the_busiest_rank_needs_as_much_as_predicted(two: RankPool, name: str, skewed: bool) -> None:
    measured, load = max(two.run(measure, PLANS[name], skewed))
    assert load > 1.9 if skewed else load < 1.3
    assert predict(PLANS[name], load) == pytest.approx(measured, rel=0.1)
