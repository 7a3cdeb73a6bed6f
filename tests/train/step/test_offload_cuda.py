"""On a GPU: with optimizer state, or all shards, in CPU memory a model trains as it does without, and needs less memory
of the GPU. Two ranks share the GPU over Gloo."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.train.session import Session
from meshwright.workloads.text.decoder import NextTokenLoss
from meshwright.workloads.text.decoder_sizes import decoder
from tests.ranks import RankPool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
STEPS = 6


def net(hidden: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return decoder("gpt2", layers=2, hidden=hidden, heads=4, vocabulary=96, sequence=32, dropout=0.0)


def batch(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1 + rank)
    start = torch.randint(0, 40, (8, 1), generator=generator)
    tokens = (start + torch.arange(33) * 3) % 96
    return tokens[:, :-1], tokens[:, 1:]


def session_of(plan: dict[str, Any], rank: int = 0, size: int = 1, hidden: int = 64) -> Session:
    return Session(
        net(hidden),
        lambda parameters: torch.optim.AdamW(parameters.values(), lr=3e-3),
        loss=NextTokenLoss(),
        plan=Plan.model_validate(plan),
        world=World(rank, 0, size, size, 0, torch.device("cuda", 0), None),
        clip_norm=1.0,
    )


def train(session: Session, rank: int = 0, steps: int = STEPS) -> list[float]:
    return [float(session.step(batch(rank))) for _ in range(steps)]


def state_devices(session: Session) -> set[str]:
    return {value.device.type for state in session.optimizer.state.values() for value in state.values()}


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"numerics": {"precision": "bf16"}},
        {"numerics": {"precision": "fp16"}},
        {"compute": {"fused_optimizer": True}},
        {"compute": {"compile": "blocks"}},
        {"memory": {"accumulation": 2}},
    ],
)
def test_one_rank_trains_as_without_offload(others: dict[str, Any], tmp_path: Path) -> None:
    memory = others.get("memory", {})
    offloading = {**others, "memory": {**memory, "offload": "optimizer"}}
    plain, offloaded = session_of(others), session_of(offloading)
    expected = train(plain)
    assert train(offloaded) == pytest.approx(expected, rel=2e-3 if "numerics" in others else 1e-4)
    assert state_devices(offloaded) == {"cpu"}
    assert {parameter.device.type for parameter in offloaded.module.parameters()} == {"cuda"}
    offloaded.save(tmp_path / "offloaded")
    plain.load(tmp_path / "offloaded")
    again = session_of(offloading)
    again.load(tmp_path / "offloaded")
    assert state_devices(again) == {"cpu"}
    following = train(plain, steps=2)
    assert train(again, steps=2) == pytest.approx(following, rel=2e-3 if "numerics" in others else 1e-4)


def peak_bytes(offload: str) -> int:
    gc.collect()  # earlier sessions, whose hooks refer to them
    before = torch.cuda.memory_allocated()
    session = session_of({"memory": {"offload": offload}}, hidden=512)
    train(session, steps=2)
    torch.cuda.reset_peak_memory_stats()
    train(session, steps=1)
    return torch.cuda.max_memory_allocated() - before


def test_optimizer_state_leaves_the_memory_of_the_gpu() -> None:
    weights = sum(parameter.numel() * parameter.element_size() for parameter in net(512).parameters())
    without = peak_bytes("none")
    assert peak_bytes("optimizer") < without - 1.9 * weights, "AdamW has two numbers of state for each weight"


def train_in_ranks(
    rank: int, size: int, plan: dict[str, Any], folder: Path | None = None
) -> tuple[list[float], set[str], dict[str, Tensor]]:
    """The losses, the devices of optimizer state and shards, and the weights in the end. With a folder, the last steps
    are those of another session, which begins with a checkpoint of the first one."""
    session = session_of(plan, rank, size)
    losses = train(session, rank, STEPS - 2)
    if folder is not None:
        session.save(folder)
        session = session_of(plan, rank, size)
        session.load(folder)
    losses += train(session, rank, 2)
    shards = {p.to_local().device.type for p in session.module.parameters() if isinstance(p, DTensor)}
    return losses, state_devices(session) | shards, session.state_dict()


@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_shards_train_as_without_offload(two: RankPool, tmp_path: Path, offload: str, precision: str) -> None:
    plan: dict[str, Any] = {"axes": {"shard": 2}, "numerics": {"precision": precision}}
    expected, _, weights = two.run(train_in_ranks, plan)[0]
    offloading = {**plan, "memory": {"offload": offload}}
    tolerance = 1e-4 if precision == "fp32" else 2e-3
    for losses, devices, state in two.run(train_in_ranks, offloading, tmp_path / "checkpoint"):
        assert losses == pytest.approx(expected, rel=tolerance)
        assert devices == ({"cpu"} if offload == "parameters" else {"cpu", "cuda"})
        for name, value in state.items():
            torch.testing.assert_close(value.cpu(), weights[name].cpu(), rtol=tolerance, atol=10 * tolerance)


def test_replicas_train_as_without_offload(two: RankPool) -> None:
    plan: dict[str, Any] = {"axes": {"replicate": 2}}
    expected, _, _ = two.run(train_in_ranks, plan)[0]
    for losses, devices, _ in two.run(train_in_ranks, {**plan, "memory": {"offload": "optimizer"}}):
        assert losses == pytest.approx(expected, rel=1e-4)
        assert devices == {"cpu"}
