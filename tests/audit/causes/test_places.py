"""Differences before the first step, of samples and positions, in a part of a gradient, and of gradients that are
missing."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.audit.causes.own_copies import own_copies
from meshwright.audit.causes.samples import explain_samples
from tests.audit.causes.records import LENGTH, Record, batch, explain, inputs_event, right_record, trained


def test_another_start(tmp_path: Path) -> None:
    record = right_record(2).change("start", lambda _, name, value: value.flip(0) if name == "up.weight" else value, 0)
    explained = explain(record, tmp_path)
    assert explained.cause == "different_start"
    assert "up.weight" in explained.explanation
    assert "the same numbers at other places" in explained.explanation


def test_copies_that_ranks_make_by_themselves(tmp_path: Path) -> None:
    """The start that is loaded afterwards is the same."""
    record = right_record(2)
    record.tensors[0, "own"] = [dict(values) for values in record.tensors[0, "start"]]
    right = record.write(tmp_path / "right")
    assert own_copies(right) == []
    record.change("own", lambda rank, name, value: value + rank if name == "up.weight" else value, 0)
    explained = explain(record, tmp_path)
    assert explained.cause == "different_start"
    assert "different copies of up.weight: on rank 1" in explained.explanation


def test_parts_of_one_weight_are_no_copies(tmp_path: Path) -> None:
    record = right_record(2, "rows")
    record.tensors[0, "own"] = [{name: value + rank for name, value in trained()[0][0].items()} for rank in range(2)]
    assert own_copies(record.write(tmp_path)) == []


# ---- samples


def with_rows(record: Record, rows: list[list[int]], step: int = 1, of_step: int | None = None) -> Record:
    """Each rank is called with these rows of the batch of a step."""
    for rank, events in enumerate(record.events):
        tokens = batch(of_step or step)[0][rows[rank]]
        record.events[rank] = [event for event in events if (event["kind"], event["step"]) != ("inputs", step)]
        record.events[rank].append(inputs_event(step, tokens))
    return record


def sentence(record: Record, folder: Path) -> str | None:
    return explain_samples(right_record().write(folder / "reference"), record.write(folder / "candidate"), 1)


@pytest.mark.parametrize(
    "rows",
    [
        [[0, 2, 4, 6], [1, 3, 5, 7]],
        [[7, 6, 5, 4], [3, 2, 1, 0]],
        [list(range(8)), list(range(8))],
        [list(range(8)), list(reversed(range(8)))],
    ],
)
def test_the_same_samples(tmp_path: Path, rows: list[list[int]]) -> None:
    assert sentence(with_rows(right_record(2), rows), tmp_path) is None


def test_the_same_samples_in_parts_of_sequences_and_in_microbatches(tmp_path: Path) -> None:
    record = right_record(2)
    for rank in range(2):
        record.events[rank] = [event for event in record.events[rank] if event["kind"] != "inputs"]
        for first in (0, 4):
            part = batch(1)[0][first : first + 4, rank * LENGTH // 2 : (rank + 1) * LENGTH // 2]
            record.events[rank].append(inputs_event(1, part))
    assert sentence(record, tmp_path) is None


def test_a_pipeline_tries_its_first_microbatch(tmp_path: Path) -> None:
    record = right_record(2, same_samples=True)
    for rank, is_last in enumerate((False, True)):
        start = record.tensors[0, "start"][rank]
        held = {name: value for name, value in start.items() if name.startswith(("head", "router")) == is_last}
        record.tensors[0, "start"][rank] = held
    for rank, events in enumerate(record.events):
        record.events[rank] = [event for event in events if event["kind"] != "inputs"]
    calls = [[0, 1], [0, 1], [2, 3], [4, 5], [6, 7]]
    record.events[0] += [inputs_event(1, batch(1)[0][rows]) for rows in calls]
    record.events[1] += [inputs_event(1, torch.randint(9, (2, LENGTH))) for _ in calls]
    assert sentence(record, tmp_path) is None


def test_the_same_microbatch_in_each_call(tmp_path: Path) -> None:
    record = right_record()
    record.events[0] = [event for event in record.events[0] if event["kind"] != "inputs"]
    record.events[0] += [inputs_event(1, batch(1)[0][:2]) for _ in range(4)]
    assert "were not seen" in (sentence(record, tmp_path) or "")


def test_later_stages_of_a_pipeline_see_no_samples(tmp_path: Path) -> None:
    record = with_rows(right_record(2), [list(range(8)), [0]])
    record.stages = [0, 1]
    assert sentence(record, tmp_path) is None


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([[0, 1, 2, 3], [0, 1, 2, 3]], "on the same 4 samples, the reference on 8"),
        ([[0, 1, 2, 3], [3, 4, 5, 6]], "1 were seen more often than in the reference, and 1 were not seen at all"),
        ([[0, 1, 2], [3, 4, 5]], "2 of the reference's samples were not seen"),
    ],
)
def test_other_samples(tmp_path: Path, rows: list[list[int]], said: str) -> None:
    assert said in (sentence(with_rows(right_record(2), rows), tmp_path) or "")


def test_the_samples_of_another_step(tmp_path: Path) -> None:
    rows = [[0, 1, 2, 3], [4, 5, 6, 7]]
    record = with_rows(with_rows(right_record(2), rows, 1, of_step=2), rows, 2, of_step=1)
    assert "step 1 has the samples of the reference's step 2" in (sentence(record, tmp_path) or "")
    record = with_rows(right_record(2), rows, 1, of_step=3)
    assert "none of them is the same" in (sentence(record, tmp_path / "other") or "")


def test_a_candidate_that_steps_after_each_microbatch(tmp_path: Path) -> None:
    record = with_rows(with_rows(right_record(2), [[0, 1], [2, 3]]), [[4, 5], [6, 7]], 2, of_step=1)
    said = "step 1 of the reference has the samples of the candidate's steps 1 to 2"
    assert said in (sentence(record, tmp_path) or "")
    record = with_rows(with_rows(right_record(2), [[0, 1], [2, 3]]), [[4, 5], [6, 6]], 2, of_step=1)
    assert said not in (sentence(record, tmp_path / "other") or "")


@pytest.mark.parametrize(("package", "said"), [("trainers", ": the package trainers made it"), ("", "shuffles")])
def test_samplers_that_shuffle_are_named(tmp_path: Path, package: str, said: str) -> None:
    run = with_rows(right_record(2), [[0, 1, 2, 3], [4, 5, 6, 7]], of_step=3).write(tmp_path / "candidate")
    run.ranks[0].header["samplers"] = [["DistributedSampler", package]]
    text = explain_samples(right_record().write(tmp_path / "reference"), run, 1) or ""
    assert f"The candidate's rows come from a DistributedSampler, which shuffles{said.removeprefix('shuffles')}" in text
    assert ("the package" in text) == bool(package)


def test_other_samples_are_named_before_what_follows_from_them(tmp_path: Path) -> None:
    record = with_rows(right_record(2), [[0, 1, 2, 3], [0, 1, 2, 3]])
    explained = explain(record.change("gradient", lambda _, __, value: 2 * value), tmp_path)
    assert explained.cause == "other_samples"


# ---- positions


def test_positions_that_start_anew(tmp_path: Path) -> None:
    reference, record = right_record(), right_record(2, same_samples=True)
    reference.events[0].append(inputs_event(1, torch.arange(LENGTH), "positions"))
    for rank in range(2):
        record.events[rank].append(inputs_event(1, torch.arange(LENGTH // 2), "positions"))
    record.change("gradient", lambda _, __, value: value + 0.2 * value.flip(0))
    explained = explain(record, tmp_path, reference)
    assert explained.cause == "positions_restart"
    assert "from 0 to 5 in the reference, and from 0 to 2 on each of ranks 0 and 1" in explained.explanation


def test_positions_that_go_on(tmp_path: Path) -> None:
    reference, record = right_record(), right_record(2, same_samples=True)
    reference.events[0].append(inputs_event(1, torch.arange(LENGTH), "positions"))
    for rank in range(2):
        first = rank * LENGTH // 2
        record.events[rank].append(inputs_event(1, torch.arange(first, first + LENGTH // 2), "positions"))
    record.change("gradient", lambda _, __, value: value + 0.2 * value.flip(0))
    assert "positions_restart" in explain(record, tmp_path, reference).ruled_out


def test_a_table_of_positions_whose_later_rows_are_not_reached(tmp_path: Path) -> None:
    record = right_record(2)
    for rank in range(2):
        record.events[rank] = [event for event in record.events[rank] if event["kind"] != "inputs"]
        part = batch(1)[0][:, rank * LENGTH // 2 : (rank + 1) * LENGTH // 2]
        record.events[rank].append(inputs_event(1, part))

    def fault(_: int, name: str, value: Tensor) -> Tensor:
        if name == "positions.weight":
            return torch.cat([value[:3] + value[3:], torch.zeros_like(value[3:])])
        return value + 0.2 * value.flip(0)

    explained = explain(record.change("gradient", fault), tmp_path)
    assert explained.cause == "positions_restart"
    assert "only the first 3 in the candidate" in explained.explanation


# ---- parts


def test_one_row_is_a_little_off(tmp_path: Path) -> None:
    def fault(_: int, name: str, value: Tensor) -> Tensor:
        if name != "up.weight":
            return value
        return torch.cat([value[:3], 1.01 * value[3:4], value[4:]])

    explained = explain(right_record(2, "rows").change("gradient", fault), tmp_path)
    assert explained.cause == "part"
    assert "only row 3 of 16 differs (on rank 0); what differs is multiplied by 1.01" in explained.explanation


def test_one_row_is_off_in_one_rank_s_copy(tmp_path: Path) -> None:
    def fault(rank: int, name: str, value: Tensor) -> Tensor:
        return torch.cat([value[:3], 1.01 * value[3:4], value[4:]]) if (rank, name) == (1, "up.weight") else value

    explained = explain(right_record(2).change("gradient", fault), tmp_path)
    assert explained.cause == "part"
    assert "only row 3 of 16 differs (on rank 1, whose copies differ from the right ones on" in explained.explanation
    assert "what differs is multiplied by 1.01" in explained.explanation


def test_one_rank_s_part_is_scaled(tmp_path: Path) -> None:
    record = right_record(2, "rows").change("gradient", lambda rank, _, value: value * (1 + rank))
    explained = explain(record, tmp_path)
    assert explained.cause == "part"
    assert "(on rank 1); what differs is multiplied by 2, the number of ranks" in explained.explanation


def test_rows_in_another_order(tmp_path: Path) -> None:
    order = [0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11, *range(12, 16)]
    record = right_record(2, "rows").change(
        "gradient", lambda _, name, value: value[order] if name == "up.weight" else value
    )
    explained = explain(record, tmp_path)
    assert explained.cause == "part"
    assert "the reference's rows in another order" in explained.explanation


def test_a_whole_gradient_is_no_part(tmp_path: Path) -> None:
    def fault(_: int, name: str, value: Tensor) -> Tensor:
        return value.sin() + value if name == "up.weight" else value

    explained = explain(right_record(2, "rows").change("gradient", fault), tmp_path)
    assert explained.cause == "unknown"
    assert "1 of 11 gradients differ (up.weight)" in explained.explanation


# ---- not reached


def test_a_gradient_that_is_missing(tmp_path: Path) -> None:
    record = right_record(2).change("gradient", lambda _, name, value: None if name == "up.bias" else value)
    explained = explain(record, tmp_path)
    assert explained.cause == "not_reached"
    assert "up.bias has no gradient in the candidate, although an optimizer has it" in explained.explanation


def test_a_parameter_that_no_optimizer_has(tmp_path: Path) -> None:
    record = right_record(2).change("gradient", lambda _, name, value: None if name == "up.bias" else value)
    for _, event in record.of_kind("options"):
        event["names"] = [name for name in event["names"] if name != "up.bias"]
    assert "whose optimizers do not have it" in explain(record, tmp_path).explanation


@pytest.mark.parametrize(
    ("layout", "rank_text"), [("replicated", "of zeros in the candidate"), ("rows", "of zeros on rank 1 of")]
)
def test_a_gradient_of_zeros(tmp_path: Path, layout: str, rank_text: str) -> None:
    def fault(rank: int, name: str, value: Tensor) -> Tensor:
        return 0 * value if name == "head.weight" and (rank == 1 or layout == "replicated") else value

    explained = explain(right_record(2, layout).change("gradient", fault), tmp_path)
    assert explained.cause == "not_reached"
    assert rank_text in explained.explanation


def test_a_small_gradient_is_reached(tmp_path: Path) -> None:
    record = right_record(2).change("gradient", lambda _, name, value: value / 1000 if name == "up.bias" else value)
    explained = explain(record, tmp_path)
    assert explained.cause == "scaled"
    assert "not_reached" in explained.ruled_out


def test_an_empty_input_has_no_rows() -> None:
    assert inputs_event(1, torch.zeros(0, LENGTH))["rows"] == []
    assert inputs_event(1, torch.zeros(3, 0))["rows"] == []
