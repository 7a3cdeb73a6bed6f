"""What workers leave for those that Ray starts after them."""

from dataclasses import replace
from pathlib import Path

from meshwright.compat.ray.notes import RunNotes
from meshwright.processes.failure import Failure

LOST = Failure(0, 0, "CollectiveError", "rank 0: lost contact", "", 4, "backward", 1.0, False)
RAISED = Failure(1, 0, "ValueError", "wrong", "", 4, "backward", 2.0, False)


def test_starts_are_counted(tmp_path: Path) -> None:
    notes = RunNotes(tmp_path)
    assert [notes.count_start() for _ in range(3)] == [0, 1, 2]


def test_the_cause_comes_before_its_consequences(tmp_path: Path) -> None:
    notes = RunNotes(tmp_path)
    assert notes.last_cause() is None
    notes.write_failure(LOST, tmp_path)
    notes.write_failure(RAISED, None)
    cause = notes.last_cause()
    assert cause is not None
    assert (cause.failure, cause.logs) == (RAISED, None)
    assert notes.final_failure() is None


def test_a_failure_that_repeats_itself_is_final(tmp_path: Path) -> None:
    notes = RunNotes(tmp_path)
    notes.write_failure(RAISED, tmp_path)
    notes.write_failure(replace(RAISED, attempt=1, step=6), tmp_path)
    assert notes.final_failure() is None
    notes.write_failure(replace(RAISED, attempt=2, step=6), tmp_path)
    final = notes.final_failure()
    assert final is not None
    assert (final.failure.attempt, final.logs) == (2, tmp_path)
