"""Norms that are not those of all gradients, and clipping that is not the same everywhere."""

import math
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.audit.causes.records import LIMIT, Record, explain, regions, right_record, trained

GRADIENTS = {name: value for name, value in trained()[0][2].items() if name}
NORM = float(trained()[0][2][""])


def clip_by(record: Record, norms: list[float]) -> Record:
    """Each rank clips by its own norm."""
    for rank, event in record.of_kind("norm"):
        if event["step"] == 1:
            event["value"] = norms[rank]
    return record.change("gradient", lambda rank, name, _: GRADIENTS[name] * LIMIT / norms[rank])


def norm_of_parts(layout: str, ranks: int, rank: int) -> float:
    squares = 0.0
    for name, value in GRADIENTS.items():
        for region in regions(layout, ranks, rank, name, tuple(value.shape)):
            squares += float(region.of(value).square().sum())
    return math.sqrt(squares)


@pytest.mark.parametrize(("layout", "same_samples"), [("rows", False), ("tensor", True)])
def test_each_rank_clips_by_the_norm_of_its_parts(tmp_path: Path, layout: str, same_samples: bool) -> None:
    norms = [norm_of_parts(layout, 2, rank) for rank in range(2)]
    explained = explain(clip_by(right_record(2, layout, same_samples, clips=True), norms), tmp_path)
    assert explained.cause == "norm_of_part"
    assert f"rank 0 by {norms[0]:.6g}" in explained.explanation
    assert "parts that the rank itself holds" in explained.explanation


@pytest.mark.parametrize("layout", ["replicated", "rows"])
@pytest.mark.parametrize(("left_out", "text"), [("expert", "the experts"), ("up.bias", "one parameter (up.bias)")])
def test_a_norm_without_some_parameters(tmp_path: Path, layout: str, left_out: str, text: str) -> None:
    norm = math.sqrt(sum(float(value.square().sum()) for name, value in GRADIENTS.items() if left_out not in name))
    explained = explain(clip_by(right_record(2, layout, clips=True), [norm] * 2), tmp_path)
    assert explained.cause == "norm_of_part"
    assert f"the norm without {text}" in explained.explanation


def test_a_norm_of_the_parameters_that_it_was_given(tmp_path: Path) -> None:
    names = [name for name in GRADIENTS if "norm" not in name]
    norm = math.sqrt(sum(float(GRADIENTS[name].square().sum()) for name in names))
    record = clip_by(right_record(2, clips=True), [norm] * 2)
    for _, event in record.of_kind("norm"):
        event["names"] = names
    explained = explain(record, tmp_path)
    assert explained.cause == "norm_of_part"
    assert "the parameters that it was not given (norm.weight and norm.bias)" in explained.explanation


def test_groups_that_are_clipped_by_one_norm_without_one_of_them(tmp_path: Path) -> None:
    norm = math.sqrt(sum(float(value.square().sum()) for name, value in GRADIENTS.items() if "expert" not in name))
    record = clip_by(right_record(2, clips=True), [norm] * 2)
    for rank, event in list(record.of_kind("norm")):
        names = event["names"]
        event["names"] = [name for name in names if "expert" in name]
        record.events[rank].append({**event, "names": [name for name in names if "expert" not in name]})
    explained = explain(record, tmp_path)
    assert explained.cause == "norm_of_part"
    assert "the norm without the experts" in explained.explanation


def test_stages_that_hold_a_tied_weight_twice_count_it_once(tmp_path: Path) -> None:
    """The head is the embedding in the reference, and on the stages two copies with the whole gradient."""
    reference, record = right_record(clips=True), right_record(2, "replicated", True, clips=True)
    reference.same_as = {"head.weight": "embed.weight"}
    both = {**GRADIENTS, "head.weight": GRADIENTS["embed.weight"]}
    norm = math.sqrt(sum(float(value.square().sum()) for name, value in both.items() if name != "head.weight"))
    for one in (reference, record):
        one.tensors[0, "start"] = [{**each, "head.weight": each["embed.weight"]} for each in one.tensors[0, "start"]]
        one.tensors = {key: value for key, value in one.tensors.items() if key[1] != "weight"}
        one.change("unclipped", lambda _, name, __: both[name]).change(
            "gradient", lambda _, name, __: both[name] / norm
        )
        for _, event in one.of_kind("norm"):
            event.update(value=norm, limit=1.0)
    own = [0.0, 0.0]
    for kind in ("unclipped", "gradient"):
        for rank, tensors in enumerate(record.tensors[1, kind]):
            first_stage = ("embed", "positions", "norm", "up")
            held = {name: value for name, value in tensors.items() if name.startswith(first_stage) == (rank == 0)}
            record.tensors[1, kind][rank] = held
            own[rank] = math.sqrt(sum(float(both[name].square().sum()) for name in held if name != "head.weight"))
    for rank, event in record.of_kind("norm"):
        event["value"] = own[rank]
    record.change("gradient", lambda rank, name, _: both[name] / max(1.0, own[rank]))
    explained = explain(record, tmp_path, reference)
    assert explained.cause == "norm_of_part"
    assert "parts that the rank itself holds" in explained.explanation


def test_copies_that_are_counted_by_every_rank(tmp_path: Path) -> None:
    norm = math.sqrt(sum(norm_of_parts("tensor", 2, rank) ** 2 for rank in range(2)))
    explained = explain(clip_by(right_record(2, "tensor", True, clips=True), [norm] * 2), tmp_path)
    assert explained.cause == "norm_of_part"
    assert "count several times" in explained.explanation


def test_a_norm_times_the_root_of_the_ranks(tmp_path: Path) -> None:
    explained = explain(clip_by(right_record(4, "rows", clips=True), [2 * NORM] * 4), tmp_path)
    assert explained.cause == "norm_of_part"
    assert "the number of ranks" in explained.explanation


def test_a_norm_that_no_part_has(tmp_path: Path) -> None:
    explained = explain(clip_by(right_record(2, clips=True), [1.2345 * NORM] * 2), tmp_path)
    assert "norm_of_part" in explained.ruled_out


def test_ranks_that_clip_by_different_norms(tmp_path: Path) -> None:
    explained = explain(clip_by(right_record(2, clips=True), [1.1 * NORM, 1.3 * NORM]), tmp_path)
    assert explained.cause == "clipped_differently"
    assert f"{1.1 * NORM:.6g} on rank 0, {1.3 * NORM:.6g} on rank 1" in explained.explanation


def test_a_candidate_that_does_not_clip(tmp_path: Path) -> None:
    explained = explain(right_record(2, "rows"), tmp_path, right_record(clips=True))
    assert explained.cause == "clipped_differently"
    assert "the candidate does not clip" in explained.explanation


def test_another_limit(tmp_path: Path) -> None:
    record = right_record(2, "rows", clips=True)
    for _, event in record.of_kind("norm"):
        event["limit"] = 2 * LIMIT
    explained = explain(record.change("gradient", lambda _, __, value: 2 * value), tmp_path)
    assert explained.cause == "clipped_differently"
    assert "the reference clips to 0.05, the candidate to 0.1" in explained.explanation


def test_gradients_that_are_not_multiplied_by_what_the_norm_gives(tmp_path: Path) -> None:
    def fault(_: int, name: str, value: Tensor) -> Tensor:
        return value if "expert" not in name else GRADIENTS[name]

    explained = explain(right_record(2, clips=True).change("gradient", fault), tmp_path)
    assert explained.cause == "clipped_differently"
    assert "experts.0.weight and experts.1.weight on ranks 0 and 1 are multiplied by 1 " in explained.explanation


def test_wrong_gradients_are_not_wrong_clipping(tmp_path: Path) -> None:
    record: Any = right_record(2, clips=True)
    for kind in ("unclipped", "gradient"):
        record.change(kind, lambda _, __, value: 2 * value)
    for _, event in record.of_kind("norm"):
        event["value"] = 2 * NORM
    explained = explain(record, tmp_path)
    assert explained.cause == "scaled"
    assert {"norm_of_part", "clipped_differently"} <= set(explained.ruled_out)


def test_only_one_rank_s_part_counts_in_the_norm(tmp_path: Path) -> None:
    """As of attention sinks in Megatron-LM#7452 (8): they are divided, and count as if each rank held all of them."""
    region = regions("tensor", 2, 1, "up.bias", tuple(GRADIENTS["up.bias"].shape))[0]
    norm = math.sqrt(NORM**2 - float(region.of(GRADIENTS["up.bias"]).square().sum()))
    record = clip_by(right_record(2, "tensor", same_samples=True, clips=True), [norm] * 2)
    explained = explain(record, tmp_path)
    assert explained.cause == "norm_of_part"
    assert "only the part that rank 0 has of up.bias counts" in explained.explanation


# ---- clipping that is not recorded


def clip_by_hand(layout: str, norms: list[float]) -> Record:
    record = right_record(2, layout, same_samples=True)
    return record.change("gradient", lambda rank, name, _: GRADIENTS[name] * LIMIT / norms[rank])


def clipped_reference() -> Record:
    return right_record().change("gradient", lambda _, name, __: GRADIENTS[name] * LIMIT / NORM)


@pytest.mark.parametrize("layout", ["rows", "tensor"])
def test_each_rank_clips_by_its_own_norm_by_hand(tmp_path: Path, layout: str) -> None:
    norms = [norm_of_parts(layout, 2, rank) for rank in range(2)]
    explained = explain(clip_by_hand(layout, norms), tmp_path, clipped_reference())
    assert explained.cause == "norm_of_part"
    assert "parts that the rank itself holds" in explained.explanation


def test_copies_count_twice_in_a_norm_by_hand(tmp_path: Path) -> None:
    norm = math.sqrt(sum(norm_of_parts("tensor", 2, rank) ** 2 for rank in range(2)))
    explained = explain(clip_by_hand("tensor", [norm] * 2), tmp_path, clipped_reference())
    assert explained.cause == "norm_of_part"
    assert "count several times" in explained.explanation


@pytest.mark.parametrize("factors", [(1.1, 1.3), (2.0, 2.0)])
def test_factors_that_no_norm_explains_are_no_norm_of_part(tmp_path: Path, factors: tuple[float, float]) -> None:
    record = clip_by_hand("tensor", [NORM / factor for factor in factors])
    assert "norm_not_seen" in explain(record, tmp_path, clipped_reference()).ruled_out


# ---- clipping of each micro-batch


def clipped_in_between(norm: float) -> Record:
    """Half of each gradient is clipped before the other half is added. The norm before this is that of the first."""
    record = right_record(2, "rows", clips=True)
    halves = {name: value / 2 for name, value in GRADIENTS.items()}
    for kind in ("unclipped", "gradient"):
        record.change(kind, lambda _, name, __: halves[name] * 0.7 + GRADIENTS[name].flip(0) / 2)
    for rank, event in list(record.of_kind("norm")):
        record.events[rank].insert(0, {**event, "value": norm})
    return record


def test_gradients_that_are_clipped_after_each_microbatch(tmp_path: Path) -> None:
    explained = explain(clipped_in_between(0.5), tmp_path)
    assert explained.cause == "clipped_each_microbatch"
    assert (
        "2 times in the step, the reference 1: before the last time, a norm of 0.5 on rank 0" in explained.explanation
    )


def test_a_norm_below_the_limit_that_is_computed_in_between_changes_nothing(tmp_path: Path) -> None:
    assert "clipped_each_microbatch" in explain(clipped_in_between(LIMIT / 2), tmp_path).ruled_out
