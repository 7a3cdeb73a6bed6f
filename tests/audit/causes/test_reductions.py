"""Gradients that are not reduced over ranks, lose digits on their way, or belong to tied weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.audit.evidence import Explained
from tests.audit.causes.records import Record, explain, right_record, rows_of, share, trained

VECTORS = ("norm.weight", "norm.bias")


def own_gradients(rank: int, ranks: int) -> dict[str, Tensor]:
    """What a data rank has before gradients are averaged; the mean over ranks is the right gradient."""
    valid = share(1, range(8)).valid
    return {name: ranks * value / valid for name, value in share(1, rows_of(rank, ranks)).gradients.items()}


def summand(rank: int, value: Tensor) -> Tensor:
    """What a tensor rank of two has before gradients are summed."""
    first = value * torch.linspace(0.2, 1.5, value.numel(), dtype=value.dtype).reshape(value.shape)
    return first if rank == 0 else value - first


@pytest.mark.parametrize("only", [(), ("norm", "embed")])
def test_data_ranks_that_are_not_averaged(tmp_path: Path, only: tuple[str, ...]) -> None:
    own = [own_gradients(rank, 2) for rank in range(2)]
    record = right_record(2).change(
        "gradient", lambda rank, name, value: own[rank][name] if name.startswith(only or "") else value
    )
    explained = explain(record, tmp_path)
    assert explained.cause == "missing_reduction"
    assert "different copies on rank 0, and rank 1; their mean is the reference's" in explained.explanation
    assert "data ranks" in explained.explanation


def test_vectors_under_sequence_parallelism_that_are_not_summed(tmp_path: Path) -> None:
    record = right_record(2, "tensor", same_samples=True)
    record.change("gradient", lambda rank, name, value: summand(rank, value) if name in VECTORS else value)
    explained = explain(record, tmp_path)
    assert explained.cause == "missing_reduction"
    assert "their sum is the reference's" in explained.explanation
    assert "must be summed" in explained.explanation


def test_rows_that_are_not_summed(tmp_path: Path) -> None:
    """As in megatron-core 0.16.1: only the rope rows of a projection are partial on each rank."""

    def fault(rank: int, name: str, value: Tensor) -> Tensor:
        if name != "head.weight":
            return value
        return torch.cat([value[:9], summand(rank, value[9:])])

    explained = explain(right_record(2, "tensor", same_samples=True).change("gradient", fault), tmp_path)
    assert explained.cause == "missing_reduction"
    assert "head.weight (rows 9 to 11)" in explained.explanation


def test_only_one_of_two_groups_is_reduced(tmp_path: Path) -> None:
    record = right_record(4)
    for rank in range(4):  # ranks 0 and 1 have the same samples, and so have 2 and 3
        record.events[rank] = right_record(2).events[rank // 2]
    record.change("gradient", lambda rank, name, value: summand(rank % 2, value) if name in VECTORS else value)
    explained = explain(record, tmp_path)
    assert explained.cause == "missing_reduction"
    assert "ranks 0 and 2, and ranks 1 and 3; their sum" in explained.explanation


def test_copies_that_differ_otherwise_are_no_missing_reduction(tmp_path: Path) -> None:
    record = right_record(2).change("gradient", lambda rank, name, value: value * (1 + 0.4 * rank))
    explained = explain(record, tmp_path)
    assert "missing_reduction" in explained.ruled_out
    record = right_record(2).change("gradient", lambda _, __, value: 2 * value)
    assert "missing_reduction" in explain(record, tmp_path / "scaled").ruled_out


def test_divided_gradients_below_may_follow(tmp_path: Path) -> None:
    """A gradient of activations that is not summed makes copies partial, and wrong what is divided below."""
    record = right_record(2, "tensor", same_samples=True)
    record.change("gradient", lambda rank, name, value: _partial_below(rank, name, value, "router"))
    explained = explain(record, tmp_path)
    assert explained.cause == "missing_reduction"
    assert "The other gradients that differ (up.weight, up.bias and down.weight)" in explained.explanation


def test_divided_gradients_above_are_not_explained(tmp_path: Path) -> None:
    record = right_record(2, "tensor", same_samples=True)
    record.change("gradient", lambda rank, name, value: _partial_below(rank, name, value, "up"))
    assert explain(record, tmp_path).cause != "missing_reduction"


def _partial_below(rank: int, name: str, value: Tensor, copied: str) -> Tensor:
    if name.startswith(("up", "down")):
        return value * torch.linspace(0, 1, value.shape[-1])
    below = ("embed", "positions", "norm", "router") if copied == "router" else ("embed", "positions", "norm")
    return summand(rank, value) if name.startswith(below) else value


# ---- tied weights


def tied(record: Record) -> Record:
    """The record as of a model whose head is its embedding: one gradient, the sum of both."""
    record.same_as = {"head.weight": "embed.weight"}
    for step in (1, 2):
        both = trained()[step - 1][2]["embed.weight"] + trained()[step - 1][2]["head.weight"]
        record.change("gradient", lambda _, name, value: both if name == "embed.weight" else value, step)  # noqa: B023
    return without_weights(record)


def without_weights(record: Record) -> Record:
    """Without the start and weights, which say nothing about the gradients that a test makes."""
    weights = trained()[0][0]
    same = {**weights, "head.weight": weights["embed.weight"], **trained()[0][1]}
    record.tensors[0, "start"] = [same] * record.ranks
    record.tensors = {key: value for key, value in record.tensors.items() if key[1] != "weight"}
    return record


@pytest.mark.parametrize("layout", ["replicated", "rows"])
def test_tied_in_the_reference_only(tmp_path: Path, layout: str) -> None:
    explained = explain(without_weights(right_record(2, layout)), tmp_path, tied(right_record()))
    assert explained.cause == "tied_on_one_side"
    assert "one tensor in the reference and two in the candidate" in explained.explanation


@pytest.mark.parametrize("layout", ["replicated", "rows"])
def test_tied_in_the_candidate_only(tmp_path: Path, layout: str) -> None:
    explained = explain(tied(right_record(2, layout)), tmp_path, without_weights(right_record()))
    assert explained.cause == "tied_on_one_side"
    assert "one tensor in the candidate and two in the reference" in explained.explanation


def test_tied_weights_that_are_scaled_are_not_untied(tmp_path: Path) -> None:
    record = tied(right_record(2)).change(
        "gradient", lambda _, name, value: value * (2 if name == "embed.weight" else 1)
    )
    explained = explain(record, tmp_path, tied(right_record()))
    assert explained.cause == "counted_twice"
    assert "used in several places (tied)" in explained.explanation


# ---- digits


@pytest.mark.parametrize("layout", ["replicated", "rows"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_before_the_reduction(tmp_path: Path, layout: str, dtype: torch.dtype) -> None:
    record = right_record(2, layout).change("gradient", lambda _, __, value: value.to(dtype).double())
    explained = explain(record, tmp_path)
    assert explained.cause == "low_precision"
    assert f"only values of {str(dtype).removeprefix('torch.')}" in explained.explanation


def test_rounded_before_the_mean_over_three(tmp_path: Path) -> None:
    record = right_record(3, same_samples=True)
    record.change("gradient", lambda _, __, value: (3 * value).bfloat16().double() / 3)
    explained = explain(record, tmp_path)
    assert explained.cause == "low_precision"
    assert "divided by 3" in explained.explanation


def test_rounded_gradients_that_are_scaled_are_not_only_rounded(tmp_path: Path) -> None:
    record = right_record(2).change("gradient", lambda _, __, value: (4 * value).bfloat16().double())
    assert "low_precision" in explain(record, tmp_path).ruled_out


def test_an_overflow(tmp_path: Path) -> None:
    def fault(rank: int, name: str, value: Tensor) -> Tensor:
        return value.masked_fill(value > value.max() / 2, torch.inf) if rank and name == "up.weight" else value

    explained = explain(right_record(2).change("gradient", fault), tmp_path)
    assert explained.cause == "not_finite"
    assert "up.weight have elements on rank 1" in explained.explanation


def test_what_is_infinite_in_the_reference_is_no_overflow(tmp_path: Path) -> None:
    def fault(_: int, name: str, value: Tensor) -> Tensor:
        return value.masked_fill(value > value.max() / 2, torch.inf) if name == "up.weight" else value

    reference = right_record().change("gradient", fault)
    record = right_record(2).change("gradient", fault).change("gradient", lambda _, __, value: 2 * value)
    assert "not_finite" in explain(record, tmp_path, reference).ruled_out


# ---- parts of a sum that no rank recorded


def with_rows(tmp_path: Path, change: Callable[[Tensor], Tensor], same_samples: bool = True) -> Explained:
    """The gradient of the last divided parameter has other rows 2 to 11."""

    def fault(_: int, name: str, value: Tensor) -> Tensor:
        return torch.cat([value[:2], change(value[2:])]) if name == "head.weight" else value

    return explain(right_record(2, "rows", same_samples=same_samples).change("gradient", fault), tmp_path)


def random_like(value: Tensor) -> Tensor:
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(5), dtype=value.dtype)


def one_part_of_a_sum(value: Tensor) -> Tensor:
    """Half of the value, and what is at right angles to it and as long as that half: the other half has its inverse."""
    other = random_like(value)
    other = other - value * (other * value).sum() / value.square().sum()
    return 0.5 * value + 0.5 * other * value.norm() / other.norm()


def test_a_part_of_a_sum_of_which_the_rest_was_not_recorded(tmp_path: Path) -> None:
    """As megatron-core 0.16.1 has it: only one rank holds the rows, and every rank uses what comes from them."""
    explained = with_rows(tmp_path, one_part_of_a_sum)
    assert explained.cause == "missing_reduction"
    assert "rows 2 to 11 of the gradient of head.weight" in explained.explanation
    assert "not summed over them" in explained.explanation


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value + 0.5 * random_like(value) * value.std(),
        lambda value: value * (torch.arange(value.shape[1]) % 2),
        lambda value: 0.5 * value,
        lambda value: value.flip(0),
    ],
    ids=["noise", "cut off", "scaled", "reordered"],
)
def test_rows_that_differ_otherwise_are_no_part_of_a_sum(tmp_path: Path, change: Callable[[Tensor], Tensor]) -> None:
    assert with_rows(tmp_path, change).cause != "missing_reduction"


def test_ranks_with_different_samples_are_no_tensor_group(tmp_path: Path) -> None:
    assert with_rows(tmp_path, one_part_of_a_sum, same_samples=False).cause != "missing_reduction"
