"""Gradients are right, and weights or buffers after the step are not."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.audit.causes.records import Record, Tensors, batch, explain, right_record, share, trained


@cache
def weights_by(optimizer: str, until: int = 1, first: int = 1, **options: Any) -> Tensors:
    """The weights after steps with another optimizer, from those before the first of them, with the right gradients."""
    weights = {name: value.clone().requires_grad_() for name, value in trained()[first - 1][0].items()}
    stepper = getattr(torch.optim, optimizer)(weights.values(), **options)
    for step in range(first, until + 1):
        for name, value in weights.items():
            value.grad = trained()[step - 1][2][name].clone()
        stepper.step()
    return {name: value.detach() for name, value in weights.items()}


def other_options(record: Record, **values: Any) -> Record:
    for _, event in record.of_kind("options"):
        event["values"].update(values)
    return record


@pytest.mark.parametrize("layout", ["replicated", "rows"])
def test_another_learning_rate(tmp_path: Path, layout: str) -> None:
    weights = weights_by("AdamW", lr=0.02)
    record = other_options(right_record(2, layout), lr=0.02).change("weight", lambda _, name, __: weights[name])
    explained = explain(record, tmp_path)
    assert explained.cause == "other_optimizer"
    assert "lr 0.02, in the reference 0.01" in explained.explanation
    assert "optimizer_state" in explained.ruled_out


def test_another_class(tmp_path: Path) -> None:
    weights = weights_by("Adam", lr=0.01, weight_decay=0.01)
    record = right_record(2).change("weight", lambda _, name, __: weights[name])
    for _, event in record.of_kind("options"):
        event["optimizer"] = "Adam"
    explained = explain(record, tmp_path)
    assert explained.cause == "other_optimizer"
    assert "another class, Adam, in the reference AdamW" in explained.explanation


def test_other_options_that_do_not_explain_the_weights(tmp_path: Path) -> None:
    weights = weights_by("AdamW", lr=0.03)
    record = other_options(right_record(2), eps=1e-7).change("weight", lambda _, name, __: weights[name])
    assert "other_optimizer" in explain(record, tmp_path).ruled_out


def test_options_without_effect_are_no_cause(tmp_path: Path) -> None:
    weights = weights_by("AdamW", lr=0.03)
    record = other_options(right_record(2), fused=True).change("weight", lambda _, name, __: weights[name])
    explained = explain(record, tmp_path)
    assert explained.cause == "optimizer_state"
    assert "other_optimizer" in explained.ruled_out


@pytest.mark.parametrize("layout", ["replicated", "rows"])
def test_a_state_that_is_lost_between_steps(tmp_path: Path, layout: str) -> None:
    weights = weights_by("AdamW", until=2, first=2, lr=0.01)
    explained = explain(right_record(2, layout).change("weight", lambda _, name, __: weights[name], 2), tmp_path)
    assert explained.cause == "optimizer_state"
    assert "in step 2 differs and was equal until step 1" in explained.explanation
    assert "an optimizer whose state is empty" in explained.explanation


def test_a_step_of_unclipped_gradients(tmp_path: Path) -> None:
    """Both clip, and the candidate's optimizer steps with the gradients before clipping. Adam's first step does not
    depend on the size of gradients, so both use SGD."""
    clipped, unclipped = (
        {name: trained()[0][0][name] - 0.01 * factor * trained()[0][2][name] for name in trained()[0][0]}
        for factor in (0.05 / float(trained()[0][2][""]), 1.0)
    )
    records = []
    for weights in (clipped, unclipped):
        record = right_record(clips=True).change("weight", lambda _, name, __: weights[name])  # noqa: B023
        for _, event in record.of_kind("options"):
            event.update(optimizer="SGD", values={"lr": 0.01, "momentum": 0.0})
        records.append(record)
    explained = explain(records[1], tmp_path, records[0])
    assert explained.cause == "optimizer_state"
    assert "gradients before clipping" in explained.explanation


def test_an_update_that_no_rule_gives(tmp_path: Path) -> None:
    record = right_record(2).change("weight", lambda _, __, value: value + 0.01 * value.flip(0))
    explained = explain(record, tmp_path)
    assert explained.cause == "optimizer_state"
    assert "the reference's is what its options give" in explained.explanation


def test_weights_that_are_not_updated(tmp_path: Path) -> None:
    before = trained()[0][0]
    record = right_record(2).change("weight", lambda _, name, value: before[name] if "expert" in name else value)
    explained = explain(record, tmp_path)
    assert explained.cause == "not_updated"
    assert "experts.0.weight and experts.1.weight on ranks 0 and 1 are the same" in explained.explanation


def test_weights_that_one_rank_does_not_get(tmp_path: Path) -> None:
    before = trained()[0][0]
    record = right_record(2).change("weight", lambda rank, name, value: before[name] if rank == 1 else value)
    explained = explain(record, tmp_path)
    assert explained.cause == "not_updated"
    assert "rank 0 updated theirs" in explained.explanation


def test_weights_that_are_updated_otherwise_are_updated(tmp_path: Path) -> None:
    weights = weights_by("AdamW", lr=0.005)
    record = right_record(2).change("weight", lambda _, name, __: weights[name])
    assert "not_updated" in explain(record, tmp_path).ruled_out


# ---- buffers


def test_stale_buffers(tmp_path: Path) -> None:
    before = trained()[0][1]
    record = right_record(2).change("buffer", lambda rank, name, value: before[name] if rank else value)
    explained = explain(record, tmp_path)
    assert explained.cause == "stale_buffers"
    assert "norm.running_mean on rank 1 is that of before step 1" in explained.explanation


def test_buffers_that_only_one_rank_keeps(tmp_path: Path) -> None:
    def fault(rank: int, name: str, value: Tensor) -> Tensor:
        return value + (0.1 - 0.2 * rank) * value.flip(0) if "mean" in name else value

    explained = explain(right_record(2).change("buffer", fault), tmp_path)
    assert explained.cause == "unsynchronized_buffers"
    assert "norm.running_mean" in explained.explanation


def test_buffers_that_each_rank_rounds_by_itself(tmp_path: Path) -> None:
    def fault(rank: int, name: str, value: Tensor) -> Tensor:
        return value + 0.1 * rank * value.flip(0) if "mean" in name else value

    explained = explain(right_record(2).change("buffer", fault), tmp_path)
    assert explained.cause == "unsynchronized_buffers"
    assert "and the reference has one" in explained.explanation


def test_batch_normalization_over_each_rank_s_own_samples(tmp_path: Path) -> None:
    shares = [share(1, range(4 * rank, 4 * rank + 4), batch_statistics=True) for rank in range(2)]
    valid = sum(one.valid for one in shares)
    gradients = {name: (shares[0].gradients[name] + shares[1].gradients[name]) / valid for name in shares[0].gradients}
    record = right_record(2).change("gradient", lambda _, name, __: gradients[name])
    for rank in range(2):
        tokens = batch(1)[0][4 * rank : 4 * rank + 4]
        weights = trained()[0][0]
        hidden = weights["embed.weight"][tokens] + weights["positions.weight"]
        record.tensors[1, "buffer"][rank]["norm.running_mean"] = 0.1 * hidden.flatten(0, 1).mean(0)
    explained = explain(record, tmp_path)
    assert explained.cause == "unsynchronized_buffers"
    assert "batch normalization" in explained.explanation


def test_wrong_buffers_that_are_equal_on_all_ranks(tmp_path: Path) -> None:
    record = right_record(2).change(
        "buffer", lambda _, name, value: value + 0.1 * value.flip(0) if value.dim() else value
    )
    explained = explain(record, tmp_path)
    assert {"stale_buffers", "unsynchronized_buffers", "scaled_buffers"} <= set(explained.ruled_out)


def test_buffers_that_are_summed_over_ranks(tmp_path: Path) -> None:
    record = right_record(2).change("buffer", lambda _, name, value: 2 * value if "mean" in name else value)
    explained = explain(record, tmp_path)
    assert explained.cause == "scaled_buffers"
    assert "2 times the reference's, the number of ranks" in explained.explanation
