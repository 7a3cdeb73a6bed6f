"""The line about a stall names the right rank, what it does, and who waits for it in which exchange."""

from dataclasses import replace

import pytest

from meshwright.processes.stall.diagnosis import diagnose
from meshwright.processes.stall.flight_recorder import CollectiveCall
from meshwright.processes.stall.record import RankRecord
from meshwright.processes.stall.report_file import format_report

LAYER = "gradient exchange of layer4.2 (bucket 1)"


def call(number: int, operation: str = "all-reduce", size: int = 500, dtype: str = "float32") -> CollectiveCall:
    return CollectiveCall("0 default_pg", number, operation, ((size,),), (dtype,), False, False)


def record(
    rank: int, exchange: str = "", place: str = "", step: int = 312, calls: tuple[CollectiveCall, ...] = ()
) -> RankRecord:
    return RankRecord(rank, step, "forward", "", exchange, place, calls, "the stack\n")


def line(*records: RankRecord, **missing: str) -> str:
    return diagnose({r.rank: r for r in records}, {int(name[5:]): text for name, text in missing.items()})


def test_the_stuck_rank_and_those_that_wait_for_it_are_named() -> None:
    stuck = record(1, place="DataLoader.__next__")
    waiting = [record(rank, LAYER, "backward") for rank in (0, 2, 3)]
    assert line(*waiting, stuck) == (
        f"rank 1 has not entered the {LAYER} at step 312; ranks 0, 2, 3 wait there; rank 1 is in DataLoader.__next__"
    )


def test_the_first_bucket_that_the_stuck_rank_has_not_called_is_named() -> None:
    """Torch counts all of them as done when the rank that waits has failed."""
    calls = [replace(call(number), is_done=True) for number in (6, 7, 8)]
    buckets = [replace(calls[number], name=f"gradient exchange of layer{number}") for number in (1, 2)]
    waiting = record(0, "gradient exchange", calls=(replace(calls[0], name="gradient exchange of layer0"), *buckets))
    stuck = record(1, place="f (m.py, line 3)", calls=(calls[0],))
    assert line(waiting, stuck) == (
        "rank 1 has not entered the gradient exchange of layer1 at step 312; rank 0 waits there; rank 1 is in"
        " f (m.py, line 3)"
    )


def test_ranks_that_wait_elsewhere_are_named_too() -> None:
    records = [record(0, LAYER), record(1, place="a (m.py, line 3)", step=311), record(2, "send or receive")]
    assert line(*records) == (
        f"rank 1 has not entered the {LAYER} at step 312; rank 0 waits there; rank 2 waits in the send or receive;"
        " rank 1 is in a (m.py, line 3) at step 311"
    )


def test_a_rank_that_waits_in_another_exchange_is_named() -> None:
    records = [record(0, LAYER), record(1, "barrier called in f (t.py, line 2)"), record(2, LAYER)]
    assert line(*records) == (
        f"rank 1 has not entered the {LAYER} at step 312; ranks 0, 2 wait there; rank 1 waits in the barrier called in"
        " f (t.py, line 2)"
    )


def test_the_rank_with_fewer_steps_is_behind() -> None:
    """It has left out a step, and is ahead in the collectives of its loader."""
    behind = record(1, "broadcast called in DataLoader.__next__", step=311, calls=(call(6), call(7)))
    ahead = record(0, "sum of losses or counts over the ranks", calls=(call(6),))
    assert line(ahead, behind) == (
        "rank 1 has not entered the sum of losses or counts over the ranks at step 312; rank 0 waits there; rank 1"
        " waits in the broadcast called in DataLoader.__next__ at step 311"
    )


def test_numbers_of_collectives_tell_who_is_late() -> None:
    """Both wait, and rank 0, which is named first otherwise, has called fewer collectives of the group."""
    ahead = record(1, "all-reduce called in a", calls=(call(6), call(7)))
    behind = record(0, "sum of losses or counts over the ranks", calls=(call(6),))
    assert line(behind, ahead) == (
        "rank 0 has not entered the all-reduce called in a at step 312; rank 1 waits there; rank 0 waits in the sum of"
        " losses or counts over the ranks"
    )


@pytest.mark.parametrize(
    ("wrong", "text", "kinds"),
    [
        (call(7, "broadcast"), "broadcast of 500 float32 values", "operation"),
        (call(7, size=700), "all-reduce of 700 float32 values", "shape"),
        (call(7, dtype="float64"), "all-reduce of 500 float64 values", "dtype"),
        (call(7, size=1, dtype="int64"), "all-reduce of 1 int64 value", "dtype and shape"),
    ],
)
def test_both_sides_of_a_mismatch_are_named(wrong: CollectiveCall, text: str, kinds: str) -> None:
    records = [record(rank, "e", "g (t.py, line 4)", calls=(call(7),)) for rank in (0, 2)]
    assert line(record(1, "e", "f (t.py, line 9)", calls=(wrong,)), *records) == (
        f"rank 1 calls {text} in f (t.py, line 9), where ranks 0, 2 call all-reduce of 500 float32 values in"
        f" g (t.py, line 4), at step 312: the {kinds} of collective 7 of this group must be the same on all ranks"
    )


def test_gathers_of_different_sizes_are_no_mismatch() -> None:
    records = [record(rank, LAYER, calls=(call(7, "all-to-all", size=rank),)) for rank in (0, 1)]
    assert line(*records).startswith(f"all ranks wait in the {LAYER} at step 312")


def test_a_rank_that_does_not_answer_comes_first() -> None:
    assert line(record(0, LAYER), rank_1="is gone, last seen at step 312 (forward)") == (
        f"rank 1 is gone, last seen at step 312 (forward); rank 0 waits in the {LAYER} at step 312"
    )


def test_ranks_that_wait_for_nobody() -> None:
    assert line(record(0, place="f"), record(1, place="g")) == (
        "no rank makes progress, and none waits for another: rank 0 is in f, rank 1 is in g"
    )


def test_a_record_survives_the_store_and_fills_the_report() -> None:
    sent = record(1, LAYER, "f (t.py, line 9)", calls=(call(7),))
    received = RankRecord.from_json(sent.to_json())
    assert received == sent
    report = format_report("the line", {1: received}, {0: "is gone"})
    assert report.startswith("the line\n")
    pending = "all-reduce of 500 float32 values   <- not done"
    for text in ("rank 0: is gone", f"waits in: {LAYER}", "the stack", pending):
        assert text in report
