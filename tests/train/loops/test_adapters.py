"""Adapters of peft on a frozen model of transformers train as in plain PyTorch, and only they are exchanged."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

import meshwright as mw
from meshwright.plan import Plan
from tests.proof.models.transformers_models import CASES, Samples
from tests.proof.traffic.counter import bytes_by_collective, count_traffic, local_bytes
from tests.ranks import RankPool
from tests.soaked import all_but
from tests.train.loops.models import assert_close
from tests.zoo_models.adapters import with_lora

BATCH, STEPS = 6, 3
PLANS: dict[str, dict[str, Any]] = {
    "replicate": {"axes": {"replicate": 2}},
    "shard": {"axes": {"shard": 2}},
    "tensor": {"axes": {"tensor": 2}},
    "pipeline": {
        "axes": {"pipeline": 2},
        "pipeline": {"microbatches": 2, "cuts": ["base_model.model.transformer.h.0"]},
    },
}


def adapter_model() -> nn.Module:
    """GPT-2, which converts no values to fp32, without dropout."""
    torch.manual_seed(0)
    model = with_lora(CASES["gpt2"].build(), target_modules=["c_attn", "mlp.c_proj"], fan_in_fan_out=True)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.double()


def next_token_loss(output: Any, labels: Tensor) -> Tensor:
    """The mean over the tokens that are not ignored, in fp64; that of transformers is computed in fp32."""
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=0.01)


def batches() -> list[dict[str, Tensor]]:
    samples = Samples("causal")
    return [default_collate([samples[BATCH * step + index] for index in range(BATCH)]) for step in range(STEPS)]


def plain() -> tuple[list[float], dict[str, Tensor]]:
    model: Any = adapter_model()
    optimizer, losses = optimizer_of(model), []
    for batch in batches():
        labels = batch.pop("labels")
        loss = next_token_loss(model(**batch), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def parallel(rank: int, size: int, axis: str) -> tuple[Any, ...]:
    """Returns the losses, the weights, the bytes exchanged in the last step by axis and collective, and the bytes that
    this rank holds."""
    model = adapter_model()
    plan = Plan.model_validate(PLANS[axis])
    session = mw.parallelize(
        model, optimizer_of(model), loss=next_token_loss, plan=plan, device="cpu", sample_batch=batches()[0]
    )
    share, losses = BATCH // plan.data_ranks, []
    first = rank * share if plan.data_ranks > 1 else 0
    for batch in batches():
        with count_traffic(session.parallel.mesh) as counter:
            loss = session.step({name: value[first : first + share] for name, value in batch.items()})
        losses.append(loss.item())
    held = local_bytes(session.module, session.optimizer)
    return losses, session.state_dict(), bytes_by_collective(counter.collectives), held


@pytest.mark.parametrize("axis", all_but(["shard"], list(PLANS)))
def test_adapters_train_as_in_plain_pytorch(two: RankPool, axis: str) -> None:
    losses, weights = plain()
    for found_losses, found_weights, traffic, held in two.run(parallel, axis):
        assert_close(found_losses, losses)
        assert_close(found_weights, weights)
        trained = 8 * sum(weight.numel() for weight in adapter_model().parameters() if weight.requires_grad)
        parts = 1 if axis == "replicate" else 2
        if axis in ("replicate", "shard"):
            assert traffic[axis, "all_reduce" if axis == "replicate" else "reduce_scatter"] == trained
            assert held["gradients"] == trained / parts
            assert held["optimizer state"] == 2 * trained / parts
