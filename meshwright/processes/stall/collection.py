"""Collects the records of all ranks through the store of the process group, when one of them asks for it.

    NUMBER/asked     a rank wants the records, because progress has stopped
    NUMBER/RANK      the record of a rank
    NUMBER/writer    counts the ranks that want to write the report; the first one does
    NUMBER/line      the first line of the report, and its path

Collections are numbered, and every rank takes part in all of them, so the number of the next one is the same on all."""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from meshwright.processes.stall.diagnosis import diagnose
from meshwright.processes.stall.record import RankRecord
from meshwright.processes.stall.report_file import format_report, write_report
from meshwright.processes.token.signed_store import read, write

_ANSWER_S = 4.0  # how long a rank may take to send its record; it looks for a request twice a second
_WRITE_S = 3.0  # how long the rank that writes the report may take
_POLL_S = 0.05

DescribeMissing = Callable[[int], str]  # what is known of a rank that did not answer, such as `is gone`


@dataclass(frozen=True)
class Finding:
    """The first line of a report, and where the report is; None if it could not be written."""

    line: str
    report: Path | None


class Collection:
    """One collection of records, as one rank takes part in it."""

    def __init__(self, store: dist.Store, number: int, rank: int, size: int) -> None:
        self._store = store
        self._number = number
        self._rank = rank
        self._size = size

    def is_asked(self) -> bool:
        return self._store.check([self._key("asked")])

    def ask(self) -> None:
        self._store.set(self._key("asked"), "1")

    def answer(self, record: RankRecord) -> None:
        write(self._store, self._key(str(self._rank)), record.to_json())

    def conclude(
        self, describe_missing: DescribeMissing, folder: Path | None, reason: str, given: str | None = None
    ) -> Finding:
        """Waits for the records. The first rank that calls this writes the report; all return its first line. `given`
        is the line if it is known already; `reason` follows the line."""
        records = self._gather()
        if self._store.add(self._key("writer"), 1) > 1:
            finding = self._wait_for_line(_WRITE_S)
            if finding is not None:
                return finding
        missing = {rank: describe_missing(rank) for rank in range(self._size) if rank not in records}
        line = (given or diagnose(records, missing)) + (f" ({reason})" if reason else "")
        report: Path | None = None
        with suppress(OSError):
            report = write_report(format_report(line, records, missing), folder)
        with suppress(RuntimeError):
            write(self._store, self._key("line"), json.dumps([line, str(report) if report else None]))
        return Finding(line, report)

    def _gather(self) -> Mapping[int, RankRecord]:
        deadline = time.monotonic() + _ANSWER_S
        keys = {rank: self._key(str(rank)) for rank in range(self._size)}
        while not self._store.check(list(keys.values())) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        there = {rank: key for rank, key in keys.items() if self._store.check([key])}
        return {rank: RankRecord.from_json(read(self._store, key)) for rank, key in there.items()}

    def wait_for_finding(self) -> Finding | None:
        """Waits until the rank that asked has gathered the records and written the report."""
        return self._wait_for_line(_ANSWER_S + _WRITE_S)

    def _wait_for_line(self, timeout_s: float) -> Finding | None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            finding = self.published()
            if finding is not None:
                return finding
            time.sleep(_POLL_S)
        return None

    def published(self) -> Finding | None:
        """Returns what the rank that writes the report has found; None if it has not written it yet."""
        if not self._store.check([self._key("line")]):
            return None
        line, report = json.loads(read(self._store, self._key("line")))
        return Finding(line, Path(report) if report else None)

    def _key(self, name: str) -> str:
        return f"stall/{self._number}/{name}"
