"""Causes that multiply gradients by a constant."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.audit.causes.records import Record, explain, right_record, rows_of, share

LAYOUTS = [("replicated", False), ("rows", False), ("tensor", True)]


@pytest.mark.parametrize(("layout", "same_samples"), LAYOUTS)
@pytest.mark.parametrize(
    ("factor", "text"), [(2.0, "the number of ranks"), (0.5, "one divided by the number of ranks")]
)
def test_all_gradients_times_the_ranks(
    tmp_path: Path, layout: str, same_samples: bool, factor: float, text: str
) -> None:
    record = right_record(2, layout, same_samples).change("gradient", lambda _, __, value: factor * value)
    explained = explain(record, tmp_path)
    assert explained.cause == "scaled"
    assert text in explained.explanation
    assert f"{factor:g} times" in explained.explanation


def test_data_ranks_and_tensor_ranks_are_told_apart(tmp_path: Path) -> None:
    record = right_record(8, "replicated")
    for rank in range(8):  # 4 data ranks, of 2 ranks each with the same samples
        record.events[rank] = right_record(4).events[rank // 2]
    explained = explain(record.change("gradient", lambda _, __, value: 4 * value), tmp_path / "data")
    assert explained.cause == "scaled"
    assert "the number of ranks with different samples (4)" in explained.explanation
    explained = explain(record.change("gradient", lambda _, __, value: value / 2), tmp_path / "tensor")
    assert "the number of ranks that have the same samples (2)" in explained.explanation


def test_microbatches_are_counted(tmp_path: Path) -> None:
    record = right_record()
    record.events[0] += [{"kind": "loss", "step": 1, "value": 2.0, "dtype": "torch.float32"}] * 2
    explained = explain(record.change("gradient", lambda _, __, value: 3 * value), tmp_path)
    assert explained.cause == "scaled"
    assert "micro-batches in a step (3): they are summed" in explained.explanation


def test_a_loss_scale_that_is_not_taken_off(tmp_path: Path) -> None:
    record = right_record()
    record.events[0].append({"kind": "scale", "step": 1, "value": 1024.0})
    explained = explain(record.change("gradient", lambda _, __, value: 1024 * value), tmp_path)
    assert explained.cause == "scaled"
    assert "the loss scale (1024)" in explained.explanation


def test_another_mean_over_targets(tmp_path: Path) -> None:
    valid, total = share(1, range(8)).valid, 48
    record = right_record(2, "rows").change("gradient", lambda _, __, value: value * valid / total)
    explained = explain(record, tmp_path)
    assert explained.cause == "scaled"
    assert "the share of targets that are valid" in explained.explanation


def test_a_factor_without_a_meaning_is_said_to_have_none(tmp_path: Path) -> None:
    explained = explain(right_record(2).change("gradient", lambda _, __, value: 1.37 * value), tmp_path)
    assert explained.cause == "scaled"
    assert "none of the numbers that were recorded" in explained.explanation


def test_two_factors(tmp_path: Path) -> None:
    record = right_record(2).change("gradient", lambda _, name, value: value * (2 if "norm" in name else 0.5))
    explained = explain(record, tmp_path)
    assert explained.cause == "scaled"
    assert "multiplied by constants" in explained.explanation


def test_noise_is_not_a_factor(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)

    def fault(_: int, __: str, value: Tensor) -> Tensor:
        return 2 * value + 0.1 * value.abs().max() * torch.randn(value.shape, generator=generator)

    explained = explain(right_record().change("gradient", fault), tmp_path)
    assert explained.cause == "unknown"
    assert "scaled" in explained.ruled_out


# ---- some of the parameters


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_what_ranks_hold_copies_of_is_reduced_twice(tmp_path: Path, factor: float) -> None:
    divided = ("up.weight", "up.bias", "down.weight", "experts.0.weight")
    record = right_record(2, "tensor", same_samples=True)
    record.change("gradient", lambda _, name, value: value if name in divided else factor * value)
    explained = explain(record, tmp_path)
    assert explained.cause == "counted_twice"
    assert "2 ranks hold copies" in explained.explanation


def test_one_weight_is_counted_twice(tmp_path: Path) -> None:
    record = right_record(4, "rows").change("gradient", lambda _, name, value: value * (1 + (name == "head.weight")))
    explained = explain(record, tmp_path)
    assert explained.cause == "counted_twice"
    assert "head.weight" in explained.explanation


def test_a_part_of_the_parameters_times_three_is_not_counted_twice(tmp_path: Path) -> None:
    record = right_record(4, "rows").change("gradient", lambda _, name, value: value * (3 if "up" in name else 1))
    assert explain(record, tmp_path).cause == "scaled"


@pytest.mark.parametrize("layout", ["experts", "rows"])
def test_experts_are_divided_once_too_often(tmp_path: Path, layout: str) -> None:
    record = right_record(2, layout).change("gradient", lambda _, name, value: value / (1 + ("expert" in name)))
    explained = explain(record, tmp_path)
    assert explained.cause == "expert_gradients"
    assert "once too often" in explained.explanation


def test_other_parameters_than_experts_are_not_named_so(tmp_path: Path) -> None:
    record = right_record(2, "experts").change("gradient", lambda _, name, value: value / (1 + ("up" in name)))
    explained = explain(record, tmp_path)
    assert explained.cause == "scaled"
    assert "expert_gradients" in explained.ruled_out


# ---- tokens


@pytest.mark.parametrize("layout", ["replicated", "rows"])
def test_averaged_over_ranks_and_not_over_targets(tmp_path: Path, layout: str) -> None:
    explained = explain(_mean_of_means(layout), tmp_path)
    assert explained.cause == "averaged_over_ranks"
    assert "valid targets" in explained.explanation
    assert "averages over ranks" in explained.explanation


def _mean_of_means(layout: str) -> Record:
    shares = [share(1, rows_of(rank, 2)) for rank in range(2)]
    parts = {name: [one.gradients[name] / one.valid for one in shares] for name in shares[0].gradients}
    means = {name: torch.stack(values).mean(0) for name, values in parts.items()}
    return right_record(2, layout).change("gradient", lambda _, name, __: means[name])


def test_uneven_targets_alone_are_no_cause(tmp_path: Path) -> None:
    def fault(_: int, name: str, value: Tensor) -> Tensor:
        return value.flip(0) if name == "head.weight" else value

    explained = explain(right_record(2, "rows").change("gradient", fault), tmp_path)
    assert explained.cause != "averaged_over_ranks"


def test_a_term_of_the_loss_is_weighted_by_own_targets(tmp_path: Path) -> None:
    """As in Megatron-LM#7452 (3): a second term is divided by own targets, and weighted by those of the first."""
    reference, record = right_record(), right_record(2)
    calls = []
    for events in (*reference.events, *record.events):
        targets = next(event for event in events if (event["kind"], event["step"]) == ("targets", 1))
        second = {**targets, "valid": targets["valid"] // 2 + 3, "summed": 0.7 * targets["summed"]}
        events.insert(events.index(targets) + 1, second)
        calls.append((targets, second))
    valid = sum(targets["valid"] for targets, _ in calls[1:])
    calls[0][1]["valid"] = sum(second["valid"] for _, second in calls[1:])
    _set_loss(
        reference,
        0,
        sum(call["summed"] / call["valid"] * weight for call, weight in zip(calls[0], (1, 0.5), strict=True)),
    )
    for rank, (first, second) in enumerate(calls[1:]):
        _set_loss(
            record, rank, 2 / valid * (first["summed"] + 0.5 * second["summed"] * first["valid"] / second["valid"])
        )
    record.change("gradient", lambda _, __, value: value + 0.1 * value.abs().max() * value.flip(0).sign())
    explained = explain(record, tmp_path, reference)
    assert explained.cause == "averaged_over_ranks"
    assert "in the second of two terms" in explained.explanation


def _set_loss(record: Record, rank: int, value: float) -> None:
    for event in record.events[rank]:
        if (event["kind"], event["step"]) == ("loss", 1):
            event["value"] = value


def test_a_loss_over_all_targets_is_not_averaged_over_ranks(tmp_path: Path) -> None:
    """Ranks have different numbers of targets, their losses are right, and gradients differ for another reason."""
    record = right_record(2)
    valid = share(1, range(8)).valid
    for rank in range(2):
        _set_loss(record, rank, 2 * share(1, rows_of(rank, 2)).loss / valid)
    record.change("gradient", lambda _, __, value: value + 0.1 * value.abs().max() * value.flip(0).sign())
    explained = explain(record, tmp_path)
    assert {"averaged_over_ranks", "averaged_over_own_tokens"} <= set(explained.ruled_out)


# ---- routers


def test_a_balance_loss_of_another_size(tmp_path: Path) -> None:
    def fault(_: int, name: str, value: Tensor) -> Tensor:
        below = ("embed", "positions", "norm", "up", "down", "router")
        return (
            value + 0.3 * value.abs().max() * torch.linspace(-1, 1, value.numel()).sin().reshape(value.shape)
            if name.startswith(below)
            else value
        )

    explained = explain(right_record(2).change("gradient", fault), tmp_path)
    assert explained.cause == "router_loss"
    assert "router.weight" in explained.explanation


def test_a_scaled_router_is_not_its_loss(tmp_path: Path) -> None:
    record = right_record(2).change("gradient", lambda _, name, value: value * (1 + 2 * ("router" in name)))
    assert explain(record, tmp_path).cause == "scaled"


@pytest.mark.parametrize("layout", ["replicated", "experts"])
def test_clipping_that_is_not_seen_does_not_hide_a_cause(tmp_path: Path, layout: str) -> None:
    record = right_record(2, layout).change("gradient", lambda _, name, value: 1.07 * value / (1 + ("expert" in name)))
    explained = explain(record, tmp_path)
    assert explained.cause == "expert_gradients"
    assert "all gradients are 1.07 times the reference's" in explained.explanation


def test_a_factor_of_all_gradients_alone_is_not_hidden_clipping(tmp_path: Path) -> None:
    explained = explain(right_record(2).change("gradient", lambda _, __, value: 1.07 * value), tmp_path)
    assert explained.cause == "scaled"
    assert "apart from this" not in explained.explanation
