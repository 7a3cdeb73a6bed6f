"""`predict` from Python takes any cluster by name and a model without memory. A model that does not fit is one line."""

from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.errors import InputError
from meshwright.workloads.text.decoder_sizes import decoder
from tests.profile.models import scores_loss, small_model


def gpt2() -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        tokens = torch.empty(2, 256, dtype=torch.long)
        return decoder("gpt2"), (tokens, tokens)


def test_a_step_on_another_cluster_is_predicted_without_its_devices() -> None:
    model, batch = gpt2()
    adamw = torch.optim.AdamW(model.parameters())
    prediction = mw.predict(model, batch, global_batch=64, loss=scores_loss, optimizer=adamw, cluster="8xH100")
    weights = sum(p.numel() for p in model.parameters()) * 4
    assert prediction.batch_per_rank == 8
    assert prediction.memory.breakdown["weights"] == weights
    assert prediction.memory.breakdown["optimizer state"] == 2 * weights
    assert prediction.memory.breakdown["gradient buckets"] == weights
    assert prediction.memory_bytes == sum(prediction.memory.breakdown.values())
    assert prediction.based_on == "datasheet; traced steps at batches 2, 3 and 5"


@pytest.mark.soak
def test_bf16_needs_less_and_a_larger_batch_more() -> None:
    model, batch = gpt2()

    def needs(samples: int, precision: str) -> int:
        plan = mw.Plan.model_validate({"numerics": {"precision": precision}})
        prediction = mw.predict(model, batch, global_batch=samples, loss=scores_loss, plan=plan, cluster="H100")
        return int(prediction.memory_bytes)

    assert needs(8, "bf16") < needs(8, "fp32") < needs(16, "fp32")


def test_a_model_that_does_not_fit_is_refused_in_one_line() -> None:
    model, batch, loss = small_model("mnist")
    plan = mw.Plan.model_validate({"axes": {"replicate": 4}})
    with pytest.raises(InputError, match="is for 4 ranks, but the cluster '2xcpu' has 2 devices"):
        mw.predict(model, batch, global_batch=8, loss=loss, plan=plan, cluster="2xcpu")
    with pytest.raises(InputError, match="H101"):
        mw.predict(model, batch, global_batch=8, loss=loss, cluster="8xH101")
    with pytest.raises(InputError, match="cannot be traced in"):
        mw.predict(model, (torch.zeros(2, 5), batch[1]), global_batch=8, loss=loss, cluster="2xcpu")


def test_a_split_of_an_unknown_module_is_refused_in_one_line() -> None:
    model, batch, loss = small_model("mnist")
    splits = {"nothing": {"kind": "column", "axis": "replicate"}}
    plan = mw.Plan.model_validate({"axes": {"replicate": 2}, "modules": {"splits": splits}})
    with pytest.raises(InputError, match=r"plan\.modules\.splits\.nothing: no layer of that name can be split"):
        mw.predict(model, batch, global_batch=8, loss=loss, plan=plan, cluster="2xcpu")
