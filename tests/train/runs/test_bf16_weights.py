"""Models whose weights are bf16, as `from_pretrained(dtype=torch.bfloat16)` gives them: they train, their checkpoints
resume bitwise, and the memory of their weights is predicted in two bytes each."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.job import Job, parse_job
from meshwright.plan import Plan
from meshwright.profile.tracing.trace import trace_profile
from meshwright.simulator.memory.device_memory import DeviceMemory
from meshwright.simulator.memory.peak import predict_memory
from meshwright.train.build import build_initialized_model
from tests.planner.cases import ADAMW
from tests.proof.models.transformers_models import CASES, SAMPLES, Samples
from tests.proof.traffic.counter import local_bytes
from tests.ranks import RankPool
from tests.soaked import all_but
from tests.train.one_process import equal_states, session_of, train
from tests.zoo_models.adapters import with_lora

AXES = ["replicate", "shard", "tensor"]


def llama() -> nn.Module:
    model: Any = CASES["llama"].build()
    model.config.use_cache = False
    return model.to(torch.bfloat16)


def adapters_on_llama() -> nn.Module:
    """Adapters in fp32, as peft makes them, on weights in bf16."""
    return with_lora(llama())


def job_of(model: str, axis: str) -> Job:
    return parse_job(
        {
            "model": {"call": f"{__name__}:{model}"},
            "data": {"train": {"call": "tests.proof.models.transformers_models:Samples", "kind": "causal"}},
            "optimizer": {"call": "torch.optim:AdamW", "lr": 0.02},
            "train": {"steps": 10, "global_batch": SAMPLES, "clip_norm": 1.0},
            "checkpoint": {"every_steps": None},
            "log": {"every_steps": 1, "tensorboard": False},
            "plan": {"axes": {axis: 2}},
        }
    )


def train_on_rank(
    rank: int, size: int, model: str, axis: str, folder: Path, stop_after: int | None = None
) -> tuple[float, dict[str, torch.Tensor], dict[str, int]]:
    """Returns the loss of the last step, the weights, and the bytes that this rank holds."""
    trainer = train(job_of(model, axis), folder, stop_after, rank, size)
    session = session_of(trainer)
    assert trainer.last_loss is not None
    return float(trainer.last_loss), session.state_dict(), local_bytes(session.module, session.optimizer)


@pytest.mark.parametrize("axis", all_but(["shard"], AXES))
def test_weights_in_bf16_train_and_resume_bitwise(two: RankPool, axis: str, tmp_path: Path) -> None:
    first_loss = two.run(train_on_rank, "llama", axis, tmp_path / "stopped", 1)[0][0]
    loss, weights, held = two.run(train_on_rank, "llama", axis, tmp_path / "whole")[0]
    assert loss < 0.8 * first_loss
    resumed = two.run(train_on_rank, "llama", axis, tmp_path / "stopped")[0]
    assert resumed[0] == loss
    assert equal_states(resumed[1], weights)
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}

    batch = torch.utils.data.default_collate([Samples("causal")[0], Samples("causal")[1]])
    profile = trace_profile(llama(), batch, None, with_structure=True)
    predicted = predict_memory(profile, Plan.model_validate({"axes": {axis: 2}}), 1, ADAMW, DeviceMemory())
    for name in ("weights", "optimizer state"):
        assert predicted.breakdown[name] == pytest.approx(held[name], rel=0.02)
    assert profile.parameter_bytes == 2 * sum(weight.numel() for weight in llama().parameters())


@pytest.mark.parametrize("axis", all_but([], AXES))
def test_adapters_in_fp32_on_weights_in_bf16_train(two: RankPool, axis: str, tmp_path: Path) -> None:
    first_loss = two.run(train_on_rank, "adapters_on_llama", axis, tmp_path / "stopped", 1)[0][0]
    loss, weights, _ = two.run(train_on_rank, "adapters_on_llama", axis, tmp_path / "whole")[0]
    assert loss < first_loss
    initial = build_initialized_model(job_of("adapters_on_llama", axis))
    for name, parameter in initial.named_parameters():
        assert parameter.dtype == (torch.float32 if "lora_" in name else torch.bfloat16)
        assert parameter.requires_grad != torch.equal(parameter.detach(), weights[name]), name
