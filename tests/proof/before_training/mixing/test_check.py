"""Tests that sessions refuse to divide the batches of a model that mixes samples, before or with the first batch."""

from typing import Any

import torch
import torch.nn.functional as F

import meshwright as mw
from meshwright.errors import MixedSamples
from tests.proof.before_training.mixing.models import INDEPENDENT, MIXING, WIDTH, Model
from tests.ranks import RankPool

PLANS: dict[str, Any] = {
    "replicate": {"axes": {"replicate": 2}},
    "shard": {"axes": {"shard": 2}},
    "accumulation": {"axes": {"replicate": 2}, "memory": {"accumulation": 2}},
}


def outcome(rank: int, plan: str, kind: str, way: str, **options: Any) -> str:
    torch.manual_seed(0)
    model = Model({**MIXING, **INDEPENDENT}[kind])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    inputs, target = torch.randn(4, WIDTH, generator=generator), torch.randint(3, (4,), generator=generator)
    sample = (torch.ones(2, WIDTH), torch.zeros(2).long()) if way == "sample" else None
    try:
        session = mw.parallelize(
            model, optimizer, loss=F.cross_entropy, plan=PLANS[plan], device="cpu", sample_batch=sample, **options
        )
        if way == "model":
            session.backward(F.cross_entropy(session.model(inputs), target))
            session.optimizer.step()
        elif way == "forward":
            session.backward(session.forward((inputs, target)))
            session.optimizer.step()
        else:
            session.step((inputs, target))
    except MixedSamples as error:
        assert optimizer.state_dict()["state"] == {}
        return str(error)
    return "trained"


def outcomes(rank: int, size: int) -> dict[str, str]:
    results = {f"{plan} {way}": outcome(rank, plan, "roll", way) for plan in PLANS for way in ("step", "sample")}
    results |= {way: outcome(rank, "replicate", "mean", way) for way in ("model", "forward")}
    results["independent"] = outcome(rank, "replicate", "dropout", "step")
    results["unchecked"] = outcome(rank, "shard", "roll", "step", check=False)
    return results


def test_sessions_refuse_to_divide_batches_whose_samples_are_mixed(two: RankPool) -> None:
    for results in two.run(outcomes):
        trained = {name for name, result in results.items() if result == "trained"}
        assert trained == {"independent", "unchecked"}
        for name in results.keys() - trained:
            assert "the module inner mixes the samples of a batch (" in results[name]
            assert "\n" not in results[name]
