"""`Timeline`: writes what rank 0 negotiates and runs as a Chrome trace, one row for each tensor. Chrome's
about:tracing and Perfetto show it."""

import json
import threading
import time
from collections.abc import Sequence
from typing import IO


class Timeline:
    """The trace file while one is open; otherwise all methods do nothing. Operations are negotiated from `negotiate` to
    `run`, and run from there to `finish`; `begin`, `change` and `end` are activities within the operations that run."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}
        self._running: list[str] = []
        self._negotiating: set[str] = set()
        self._mark_cycles = False
        self._first = True
        self._start_s = 0.0

    def open(self, path: str, mark_cycles: bool) -> None:
        """Starts a new file, and closes the one that is open."""
        self.close()
        with self._lock:
            self._file = open(path, "w")  # noqa: SIM115  # it stays open until `close`
            self._rows, self._running, self._negotiating = {}, [], set()
            self._mark_cycles, self._first, self._start_s = mark_cycles, True, time.monotonic()
            self._file.write("[\n")
            self._write(name="process_name", ph="M", pid=0, args={"name": "Horovod"})
            start_us = int(time.time() * 1e6)
            self._write(name="process_labels", ph="M", pid=0, args={"start_time_since_epoch_in_micros": start_us})

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                for title in self._negotiating | set(self._running):
                    self._event(title, "E")
                self._file.write("\n]\n")
                self._file.close()
                self._file = None

    def cycle(self) -> None:
        if self._file is not None and self._mark_cycles:
            with self._lock:
                self._write(name="CYCLE_START", ph="i", pid=0, tid=0, ts=self._now(), s="g")

    def negotiate(self, title: str, kind: str) -> None:
        if self._file is not None:
            with self._lock:
                self._negotiating.add(title)
                self._event(title, "B", f"NEGOTIATE_{kind.upper()}")

    def run(self, titles: Sequence[str], kind: str) -> None:
        if self._file is not None:
            with self._lock:
                for title in titles:
                    if title in self._negotiating:
                        self._negotiating.remove(title)
                        self._event(title, "E")
                    self._event(title, "B", kind.upper())
                self._running = list(titles)

    def begin(self, activity: str) -> None:
        self._running_event("B", activity)

    def change(self, activity: str) -> None:
        self._running_event("E")
        self._running_event("B", activity)

    def end(self) -> None:
        self._running_event("E")

    def finish(self) -> None:
        self._running_event("E")
        self._running = []

    def _running_event(self, phase: str, name: str = "") -> None:
        if self._file is not None:
            with self._lock:
                for title in self._running:
                    self._event(title, phase, name)

    def _event(self, title: str, phase: str, name: str = "") -> None:
        row = self._rows.get(title)
        if row is None:
            row = self._rows[title] = len(self._rows) + 1
            self._write(name="process_name", ph="M", pid=row, args={"name": title})
            self._write(name="process_sort_index", ph="M", pid=row, args={"sort_index": row})
        self._write(ph=phase, pid=row, tid=0, ts=self._now(), **({"name": name} if name else {}))

    def _now(self) -> int:
        return int((time.monotonic() - self._start_s) * 1e6)

    def _write(self, **event: object) -> None:
        if self._file is not None:
            self._file.write(("" if self._first else ",\n") + json.dumps(event))
            self._file.flush()
            self._first = False
