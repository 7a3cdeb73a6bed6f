"""`Watchdog`: a thread of each rank that answers when another rank asks what this one is doing, also while the thread
that trains is stuck. It looks twice a second, and does nothing else while steps are made."""

import itertools
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from meshwright.processes.heartbeat import Heartbeat, describe_progress, heartbeat_file, read_heartbeat
from meshwright.processes.stall.collection import Collection, Finding
from meshwright.processes.stall.departure import Departure, await_others, find_departure, tell_departure, tell_wait
from meshwright.processes.stall.position import find_position, stack_of
from meshwright.processes.stall.process_state import describe_process
from meshwright.processes.stall.record import record_of_thread
from meshwright.processes.stall.terminate import TerminateHook
from meshwright.processes.token.signed_store import SignedStore
from meshwright.processes.torch_private import another_connection
from meshwright.processes.world import World

_POLL_S = 0.5
_ASKED_POLL_S = 0.05
_SAME_STALL_S = 10.0  # ranks that ask within this time ask about the same stall
_ASKED_S = 2.0  # how long a rank that has closed its connections may take to ask the others
_LATER_THAN_TIMEOUT_S = 5.0  # ranks that wait for others fail by themselves at the timeout
_EARLIER_THAN_TIMEOUT = 0.95  # of the timeout: NCCL ends the process at the timeout


_watchdogs = itertools.count()  # every rank makes them in the same order, so each has the same names in the store


class Watchdog:
    """Watches the thread that creates it. `report_stall` is called in the watchdog's thread with the finding if no rank
    makes progress, and none fails for it. `at_termination` is called with the finding if a library ends the process."""

    def __init__(
        self,
        world: World,
        store: dist.Store,
        heartbeat: Heartbeat,
        timeout_s: float,
        report_stall: Callable[[Finding], None],
        at_termination: Callable[[Finding], None],
    ) -> None:
        self._world = world
        self._heartbeat = heartbeat
        self._timeout_s = timeout_s
        self._report_stall = report_stall
        self._at_termination = at_termination
        self._thread_id = threading.get_ident()
        self._store = another_connection(store)  # a wait of another thread blocks its connection
        self._collections = 0  # in which this rank has taken part
        self._answered_at = 0.0
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._error: BaseException | None = None
        # Returns the line about a rank that has left, if this one waits for it.
        self.describe_wait: Callable[[Departure], str | None] = lambda left: None
        self._hook = TerminateHook(self._before_termination)
        self._hook.set()
        self._thread = threading.Thread(target=self._watch, name="meshwright watchdog", daemon=True)
        self._thread.start()

    def find_cause(self, error: BaseException | None, reason: str, given: str | None = None) -> Finding | None:
        """Collects what all ranks are doing, and returns the first line of the report about it; None if the store is
        gone. `error` is the exception that this rank has raised. `reason` is added to the line in parentheses. `given`
        is the line if it is known already."""
        self._error = error
        try:
            with self._lock:
                if self._has_answered_recently():
                    collection = self._collection(self._collections)  # another rank has asked a moment ago
                else:
                    collection = self._collection(self._collections + 1)
                    collection.ask()
                    self._answer(collection)
            return collection.conclude(self._describe_missing, self._heartbeat.folder, reason, given)
        except (RuntimeError, OSError, ValueError):
            return None

    def recent_finding(self) -> Finding | None:
        """Returns what another rank has found a moment ago; None if none has."""
        if not self._has_answered_recently():
            return None
        with suppress(RuntimeError, OSError, ValueError):
            return self._collection(self._collections).published()
        return None

    def await_finding(self, error: BaseException, is_gone: Callable[[], bool]) -> Finding | None:
        """Returns what another rank finds, for a rank whose connection to it broke with `error`; None if none asks
        within `_ASKED_S`, or if `is_gone` says that a rank could not ask any more."""
        self._error = error
        deadline = time.monotonic() + _ASKED_S
        with suppress(RuntimeError, OSError, ValueError):
            while not self._has_answered_recently():
                if is_gone() or time.monotonic() > deadline:
                    return None
                self._answer_if_asked()
                time.sleep(_ASKED_POLL_S)
            return self._collection(self._collections).wait_for_finding()
        return None

    def leave(self, steps: int, error: str | None) -> None:
        """Tells the other ranks that this one has left its loop, and lets the thread end."""
        tell_departure(self._store, Departure(self._world.rank, steps, error))
        self.stop()

    def departure(self, *, waits: bool) -> Departure | None:
        """Returns that another rank has left its loop; None if none has. With `waits`, one may still be leaving."""
        return find_departure(self._store, self._world.rank, self._world.size, waits=waits)

    def tell_wait(self, line: str) -> None:
        """Tells a rank that has left its loop that this one waits for it."""
        tell_wait(self._store, self._world.rank, line)

    def await_others(self, limit_s: float) -> str | None:
        """Waits until all ranks have left. Returns the line of a rank that waits for this one; None if none does."""
        return await_others(self._store, self._world.rank, self._world.size, limit_s)

    def stop(self) -> None:
        """Lets the thread end. Does not wait for it."""
        self._hook.remove()
        self._end.set()

    def close(self) -> None:
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        seen, since, has_reported = -1, time.monotonic(), False
        while not self._end.wait(_POLL_S):
            now, changes = time.monotonic(), self._heartbeat.changes
            if changes != seen:
                seen, since, has_reported = changes, now, False
                self._error = None  # the loop has caught it, and goes on
                continue
            try:
                self._note_place()
                self._answer_if_asked()
                self._tell_if_waiting()
                if not has_reported and changes and now - since > self._longest_s():
                    has_reported = True
                    finding = self.find_cause(None, f"no progress within {self._timeout_s:g} s")
                    if finding is not None and self._world.rank == 0:
                        self._report_stall(finding)
            except (RuntimeError, OSError, ValueError):  # the store is gone: the ranks end
                return

    def _longest_s(self) -> float:
        if self._heartbeat.device == "cuda":
            return self._timeout_s * _EARLIER_THAN_TIMEOUT
        return self._timeout_s + _LATER_THAN_TIMEOUT_S

    def _note_place(self) -> None:
        names = self._heartbeat.exchanges
        waiting = names.waiting() if names is not None else None
        position = find_position(stack_of(sys._current_frames().get(self._thread_id)))
        self._heartbeat.note_place(waiting or position.exchange or position.place)

    def _has_answered_recently(self) -> bool:
        return self._collections > 0 and time.monotonic() - self._answered_at <= _SAME_STALL_S

    def _tell_if_waiting(self) -> None:
        left = self.departure(waits=False)
        line = self.describe_wait(left) if left is not None else None
        if line is not None:
            self.tell_wait(line)

    def _answer_if_asked(self) -> None:
        with self._lock:
            collection = self._collection(self._collections + 1)
            if collection.is_asked():
                self._answer(collection)

    def _answer(self, collection: Collection) -> None:
        record = record_of_thread(self._world.rank, self._heartbeat, self._thread_id, self._error)
        collection.answer(record)
        self._collections += 1
        self._answered_at = time.monotonic()

    def _collection(self, number: int) -> Collection:
        return Collection(self._store, number, self._world.rank, self._world.size)

    def _before_termination(self) -> None:
        finding = self.find_cause(None, "the communication library has ended the process")
        if finding is not None:
            self._at_termination(finding)

    def _describe_missing(self, rank: int) -> str:
        """Returns what is known of a rank that does not answer, from its heartbeat, if this machine has it."""
        folder = self._heartbeat.folder
        last = read_heartbeat(heartbeat_file(folder, rank)) if folder is not None else None
        if last is None or last.attempt != self._world.attempt:
            return "does not answer"
        place = f" in {last.place}" if last.place else ""
        return f"{describe_process(last.pid)}, last seen{describe_progress(last.step, last.activity)}{place}"


def _part(store: dist.Store, name: str) -> dist.Store:
    return store.part(name) if isinstance(store, SignedStore) else dist.PrefixStore(name, store)


def make_watchdog(
    world: World,
    store: dist.Store | None,
    heartbeat: Heartbeat,
    timeout_s: float,
    report_stall: Callable[[Finding], None],
    at_termination: Callable[[Finding], None],
) -> Watchdog | None:
    """Returns a watchdog; None on a single rank, and if there is no store that several connections can use."""
    if world.size == 1 or store is None:
        return None
    heartbeat.device = world.device.type
    with suppress(RuntimeError, NotImplementedError, AttributeError):
        part = _part(store, f"watchdog{next(_watchdogs)}")
        return Watchdog(world, part, heartbeat, timeout_s, report_stall, at_termination)
    return None
