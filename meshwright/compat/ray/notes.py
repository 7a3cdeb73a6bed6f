"""`RunNotes`: what the workers of one command leave for each other and for the command, in a folder on the storage that
they share. Ray starts all workers again after a failure, and forgets what they knew."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright.files.storage import write_atomically, writing
from meshwright.processes.failure import Failure, is_consequence, repeats


@dataclass(frozen=True)
class FailedRank:
    """The failure of a rank. `logs` is the folder of the ranks' logs, or None if the rank failed before it had one."""

    failure: Failure
    logs: Path | None


@dataclass(frozen=True)
class RunNotes:
    """The files of the folder: `starts` has a line for each time that rank 0 was started, and
    `failure-A-R.json` says why rank R failed in attempt A."""

    folder: Path

    def count_start(self) -> int:
        """Returns how often rank 0 was started before, and counts this start."""
        starts = self.folder / "starts"
        with writing(starts), starts.open("a+") as file:
            file.seek(0)
            before = len(file.readlines())
            file.write("start\n")
        return before

    def write_failure(self, failure: Failure, logs: Path | None) -> None:
        """Records the failure. It is final, too, if the attempt before has failed in the same way."""
        previous = self._read(self._file(failure.attempt - 1, failure.rank))
        is_final = failure.final or repeats(failure, previous.failure if previous else None)
        record = {**asdict(failure), "final": is_final, "logs": str(logs) if logs else None}
        write_atomically(self._file(failure.attempt, failure.rank), json.dumps(record))

    def final_failure(self) -> FailedRank | None:
        """Returns a failure that a restart would only repeat; None if there is none."""
        return next((failed for failed in self._failures() if failed.failure.final), None)

    def last_cause(self) -> FailedRank | None:
        """Returns the failure of the last attempt that most likely caused the others; None if none was recorded."""
        failures = self._failures()
        last = max((failed.failure.attempt for failed in failures), default=0)
        latest = [failed for failed in failures if failed.failure.attempt == last]
        return min(latest, key=lambda failed: (is_consequence(failed.failure), failed.failure.time), default=None)

    def _file(self, attempt: int, rank: int) -> Path:
        return self.folder / f"failure-{attempt}-{rank}.json"

    def _failures(self) -> list[FailedRank]:
        failures = [self._read(file) for file in sorted(self.folder.glob("failure-*.json"))]
        return [failed for failed in failures if failed is not None]

    def _read(self, file: Path) -> FailedRank | None:
        if not file.exists():
            return None
        record = json.loads(file.read_text())
        logs = record.pop("logs")
        return FailedRank(Failure(**record), Path(logs) if logs else None)
