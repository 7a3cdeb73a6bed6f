"""Checkpoints of divided experts hold whole weights and optimizer state, and load under other plans."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.parallel.weights.layout import local_tensor
from meshwright.plan import Plan
from meshwright.train.session import Session
from meshwright.workloads.text.decoder import Decoder, NextTokenLoss
from tests.proof.models.transformers_models import ListedMixture
from tests.ranks import RankPool
from tests.soaked import all_but
from tests.zoo import LENGTH, WORDS, mixture

PLANS: tuple[dict[str, int], ...] = (
    {"shard": 4, "expert": 2},
    {"replicate": 4, "expert": 4},
    {"shard": 4},
    {"replicate": 2, "shard": 2, "expert": 2},
)


def tokens(kind: str, size: int) -> Any:
    values = torch.randint(0, WORDS, (size, LENGTH), generator=torch.Generator().manual_seed(3))
    if kind != "list":
        return values, values
    ids = values % 32
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def two_experts() -> Decoder:
    """Under shard 4 and expert 2, two ranks share one expert: they shard its second dimension."""
    experts = {"number": 2, "top_k": 1}
    return Decoder(2, 16, 4, LENGTH, WORDS, positions="rotary", activation="swiglu", feedforward=16, experts=experts)


def session_under(axes: dict[str, int], kind: str) -> Session:
    torch.manual_seed(5)
    makers: dict[str, Callable[[], nn.Module]] = {"stacked": mixture, "two experts": two_experts, "list": ListedMixture}
    model = makers[kind]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)  # the default on GPUs
    loss = None if kind == "list" else NextTokenLoss()
    return mw.parallelize(
        model, optimizer, loss=loss, plan=Plan.model_validate({"axes": axes}), sample_batch=tokens(kind, 8)
    )


def save_and_load(rank: int, size: int, kind: str, axes: list[dict[str, int]], folder: Path) -> int:
    """Trains a step under each plan, and goes on from its checkpoint under the next one. Returns how many elements of
    experts this rank holds under the last plan."""
    batch = tokens(kind, 8)
    rows = slice(rank * 2, rank * 2 + 2)
    share = tuple(t[rows] for t in batch) if isinstance(batch, tuple) else {n: t[rows] for n, t in batch.items()}
    expected: dict[str, Tensor] | None = None
    for number, of_plan in enumerate(axes):
        session = session_under(of_plan, kind)
        if number:
            session.load(folder / str(number - 1))
            assert expected is not None
            loaded = session.state_dict()
            assert loaded.keys() == expected.keys()
            assert all(torch.equal(loaded[name], value) for name, value in expected.items())
        session.step(share)
        expected = {name: value.clone() for name, value in session.state_dict().items()}
        if number < len(axes) - 1:
            session.save(folder / str(number))
    parameters = session.parallel.parameters()
    return sum(local_tensor(p).numel() for name, p in parameters.items() if ".experts." in name)


@pytest.mark.soak
def test_a_run_with_stacked_experts_goes_on_under_other_plans(four: RankPool, tmp_path: Path) -> None:
    four.run(save_and_load, "stacked", list(PLANS), tmp_path)


@pytest.mark.parametrize("plans", all_but(["two"], ["two", "three"]))
def test_a_run_with_a_list_of_experts_goes_on_under_other_plans(four: RankPool, plans: str, tmp_path: Path) -> None:
    four.run(save_and_load, "list", [PLANS[1], *(PLANS[2:3] if plans == "three" else ()), PLANS[3]], tmp_path)


def test_a_run_with_fewer_experts_than_ranks_goes_on_under_other_plans(four: RankPool, tmp_path: Path) -> None:
    held = four.run(save_and_load, "two experts", [PLANS[0], PLANS[3], PLANS[0]], tmp_path)
    whole = sum(p.numel() for name, p in two_experts().named_parameters() if ".experts." in name)
    assert held == [whole // 4] * 4, "ranks that share an expert hold equal parts of it"
