"""`Engine`: the thread of each rank that sends the requests of this rank to rank 0, receives which operations may run,
and runs them. On rank 0 it also decides this, with `Negotiation`.

A rank does not send each request at once: it sends all that have come up to the end of a cycle together, or at once
when somebody waits for one of them. So the gradients of a backward pass are few groups, and not as many as there are
parameters.
"""

import os
import selectors
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from meshwright.compat.horovod.engine.control import ControlLinks
from meshwright.compat.horovod.engine.data_group import DataGroup
from meshwright.compat.horovod.engine.execute import execute, zeros_for
from meshwright.compat.horovod.engine.negotiation import Key, Negotiation
from meshwright.compat.horovod.engine.operation import Operation
from meshwright.compat.horovod.engine.requests import (
    ADD_PROCESS_SET,
    GLOBAL_SET,
    JOIN,
    REMOVE_PROCESS_SET,
    Request,
)
from meshwright.compat.horovod.engine.stalls import CHECK_S, StallCheck
from meshwright.compat.horovod.engine.timeline import Timeline
from meshwright.compat.horovod.exceptions import HorovodInternalError, MismatchError
from meshwright.compat.horovod.variables import HorovodVariables

_DEFERRED_S = 0.5
_BLOCKED_S = 0.2  # after this time, a rank that waits for an operation tells rank 0 so


class Engine:
    """The engine of one rank between `hvd.init()` and `hvd.shutdown()`."""

    def __init__(
        self,
        rank: int,
        size: int,
        links: ControlLinks,
        store: dist.Store | None,
        settings: HorovodVariables,
        timeline: Timeline,
    ) -> None:
        self.rank, self.size = rank, size
        self.gpu = 0  # where a rank that has joined makes its zeros
        self.process_sets: dict[int, tuple[int, ...]] = {GLOBAL_SET: tuple(range(size))}
        self._links, self._store, self._settings, self._timeline = links, store, settings, timeline
        self._negotiation = Negotiation(size, settings.fusion_bytes) if rank == 0 else None
        self._groups: dict[int, DataGroup] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._lock = threading.Lock()
        self._outstanding: dict[Key, Operation] = {}
        self._unsent: list[Operation] = []
        self._blocked: list[Key] = []
        self._send_at_s = 0.0
        self._deferred = False
        self._urgent = self._leaving = self._woken = False
        self._failure: str | None = None
        self._rejoins = self._rank_0_rejoins = False
        self._numbers: OrderedDict[Request, int] = OrderedDict()  # the numbers of requests that rank 0 knows
        self._next_number = 0
        self._by_number: dict[int, Operation] = {}
        self._requests: dict[int, dict[int, Request]] = {peer: {} for peer in range(size)}  # of rank 0: by rank, number
        self._stalls = StallCheck(settings.stall_warning_s, settings.stall_shutdown_s)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        for peer, connection in links.connections.items():
            self._selector.register(connection, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(target=self._run, name="horovod engine", daemon=True)
        self._thread.start()

    def submit(self, operation: Operation) -> None:
        """Asks for an operation. Raises `ValueError` if one of the same name is not finished on this rank."""
        key = operation.request.key
        with self._lock:
            if self._failure is not None:
                raise HorovodInternalError(self._failure)
            if key in self._outstanding:
                other = self._outstanding[key].request
                raise ValueError(
                    f"{operation.request.title} was called with shapes {list(operation.request.shapes)} while an"
                    f" earlier call of the same name, with shapes {list(other.shapes)}, is not finished: give each"
                    " operation a name of its own, or synchronize the earlier one first"
                )
            self._outstanding[key] = operation
            if not self._unsent:
                cycle_s = _DEFERRED_S if self._deferred else self._settings.cycle_s
                self._send_at_s, self._deferred = time.monotonic() + cycle_s, False
            self._unsent.append(operation)
            if len(self._unsent) == 1:
                self._wake()
        self._timeline.negotiate(operation.request.title, operation.request.kind)

    def wait(self, operation: Operation) -> None:
        """Waits until the operation is finished. Raises its error."""
        if not operation.done.is_set():
            self.hurry()
            while not operation.done.wait(_BLOCKED_S):
                with self._lock:
                    self._blocked.append(operation.request.key)
                    self._wake()
        if operation.error is not None:
            raise operation.error
        if operation.finished is not None:
            stream = torch.cuda.current_stream(operation.inputs[0].device)
            stream.wait_event(operation.finished)
            for tensor in operation.outputs:  # their memory may have been allocated for the engine's stream
                tensor.record_stream(stream)

    def defer(self) -> None:
        """Lets the next operation, if it is the first that is not sent, and those after it wait for `hurry`. Where
        ranks compute on all cores, an exchange during the backward pass only slows it down."""
        self._deferred = True

    def hurry(self) -> None:
        """Sends the requests that have not been sent without waiting for the end of the cycle."""
        with self._lock:
            if self._unsent and not self._urgent:
                self._urgent = True
                self._wake()

    @property
    def failure(self) -> str | None:
        return self._failure

    @property
    def rank_0_rejoins(self) -> bool:
        """Whether the failure is that rank 0 has left in order to call `hvd.init()` again."""
        return self._rank_0_rejoins

    def close(self, rejoins: bool) -> list[DataGroup]:
        """Leaves the other ranks, and tells them whether this rank will call `hvd.init()` again. Unfinished operations
        fail, here and there. Returns connections that other ranks may still read from."""
        with self._lock:
            self._leaving, self._rejoins = True, rejoins
            self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._fail("hvd.shutdown() was called")
        self._links.close()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        groups = list(self._groups.values())
        self._groups = {}
        return groups

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            with suppress(BlockingIOError):
                os.write(self._wake_write, b"x")

    # ---- the thread

    def _run(self) -> None:
        try:
            with torch.no_grad():
                while self._cycle():
                    pass
        except Exception as error:
            text = f"{type(error).__name__}: {error}" if not str(error) else str(error)
            self._report_failure(f"rank {self.rank}: {text}")

    def _cycle(self) -> bool:
        """Waits for something to do and does it. Returns whether there will be more."""
        ready = self._selector.select(self._timeout_s())
        for selected, _ in ready:
            if selected.data is None:
                with suppress(BlockingIOError):
                    os.read(self._wake_read, 64)
            else:
                self._receive(selected.data)
        if self._failure is not None:
            return False
        frame, leaving = self._take_unsent()
        if frame:
            self._timeline.cycle()
            if self._negotiation is not None:
                self._negotiate(0, frame)
            else:
                self._links.send(0, frame)
        if self._negotiation is not None:
            if problem := self._stalls.look(self._negotiation):
                self._report_failure(problem)
                return False
            self._answer(self._negotiation)
        return not leaving and self._failure is None

    def _timeout_s(self) -> float | None:
        with self._lock:
            if self._unsent and not self._urgent:
                return max(0.0, self._send_at_s - time.monotonic())
            if self._unsent or self._blocked or self._leaving:
                return 0.0
        return CHECK_S if self._negotiation is not None and self._stalls.enabled and self.size > 1 else None

    def _take_unsent(self) -> tuple[dict[str, Any], bool]:
        """Returns the frame with the requests whose cycle is over, and whether this rank leaves."""
        frame: dict[str, Any] = {}
        with self._lock:
            self._woken = False
            submitted: list[Operation] = []
            if self._unsent and (self._urgent or self._leaving or time.monotonic() >= self._send_at_s):
                submitted, self._unsent, self._urgent = self._unsent, [], False
            blocked, self._blocked = self._blocked, []
            leaving = self._leaving
        for operation in submitted:
            self._add_to(frame, operation)
        if blocked:
            frame["blocked"] = blocked
        if leaving:
            frame["leave"] = True
        return frame, leaving

    def _add_to(self, frame: dict[str, Any], operation: Operation) -> None:
        """Adds a request to a frame, by its number alone if rank 0 has it already."""
        request = operation.request
        number = self._numbers.get(request)
        if number is None:
            number = self._next_number
            self._next_number += 1
            frame.setdefault("define", []).append([number, request.to_plain()])
            self._numbers[request] = number
            if len(self._numbers) > max(1, self._settings.cache_capacity):
                self._forget(frame)
        else:
            self._numbers.move_to_end(request)
        self._by_number[number] = operation
        frame.setdefault("submit", []).append(number)

    def _forget(self, frame: dict[str, Any]) -> None:
        """Drops the number that was not used for the longest time, unless it is in use."""
        request, number = next(iter(self._numbers.items()))
        if number not in self._by_number:
            del self._numbers[request]
            frame.setdefault("forget", []).append(number)

    def _receive(self, peer: int) -> None:
        reader = self._links.readers.get(peer)
        frames = reader.available() if reader is not None else []
        if frames is None:
            self._selector.unregister(self._links.connections[peer])
            self._links.drop(peer)
            self._fail_or_forward(f"rank {peer} has died")
            return
        for frame in frames:
            if "failed" in frame:
                self._fail_or_forward(frame["failed"])
            elif self._negotiation is not None:
                self._negotiate(peer, frame)
            elif frame.get("leave"):
                self._selector.unregister(self._links.connections[peer])
                self._links.drop(peer)
                self._rank_0_rejoins = frame["rejoins"]
                self._fail(f"rank {peer} has shut down; call hvd.shutdown() on no rank before the others are done")
            else:
                self._obey(frame)

    def _negotiate(self, rank: int, frame: dict[str, Any]) -> None:
        assert self._negotiation is not None
        known = self._requests[rank]
        known.update({number: Request.from_plain(plain) for number, plain in frame.get("define", ())})
        for number in frame.get("submit", ()):
            self._negotiation.submit(rank, number, known[number])
        for number in frame.get("forget", ()):
            del known[number]
        for process_set, kind, name in frame.get("blocked", ()):
            self._negotiation.block(rank, (process_set, kind, name))
        if frame.get("leave"):
            self._negotiation.leave(rank)
            if rank != 0:
                self._selector.unregister(self._links.connections[rank])
                self._links.drop(rank)

    def _answer(self, negotiation: Negotiation) -> None:
        frames = negotiation.take()
        for rank, frame in frames.items():
            if rank != 0:
                self._links.send(rank, frame)
        if self._leaving:
            for rank in list(self._links.connections):
                self._links.send(rank, {"leave": True, "rejoins": self._rejoins})
        if 0 in frames:
            self._obey(frames[0])

    def _obey(self, frame: dict[str, Any]) -> None:
        """Runs the groups of a frame of rank 0, and finishes the operations that have failed."""
        for number, text, is_mismatch in frame.get("errors", ()):
            error = MismatchError(text) if is_mismatch else HorovodInternalError(text)
            self._complete([self._by_number.pop(number)], error)
        for entry in frame.get("groups", ()):
            if "ids" in entry:
                self._execute([self._by_number.pop(number) for number in entry["ids"]], entry["details"])
            else:
                requests = [Request.from_plain(plain) for plain in entry["zeros"]]
                self._execute([zeros_for(request, self.gpu) for request in requests], entry["details"])

    def _execute(self, operations: list[Operation], details: list[Any]) -> None:
        request = operations[0].request
        self._timeline.run([operation.request.title for operation in operations], request.kind)
        try:
            if request.kind in (ADD_PROCESS_SET, REMOVE_PROCESS_SET, JOIN):
                self._change_process_sets(request, details[0])
                operations[0].value = details[0]
            elif request.device == "cuda":
                self._execute_on_gpu(operations, details)
            else:
                execute(operations, details, self._group(request.process_set), self._timeline)
        except Exception as error:
            text = f"rank {self.rank}, {request.title}: {error}"
            self._complete(operations, HorovodInternalError(text))
            raise HorovodInternalError(text) from error
        finally:
            self._timeline.finish()
        self._complete(operations, None)

    def _execute_on_gpu(self, operations: list[Operation], details: list[Any]) -> None:
        device = operations[0].inputs[0].device
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        with torch.cuda.device(device), torch.cuda.stream(stream):
            for operation in operations:
                if operation.ready is not None:
                    stream.wait_event(operation.ready)
            execute(operations, details, self._group(operations[0].request.process_set), self._timeline)
            finished = torch.cuda.Event()
            finished.record(stream)
            for operation in operations:
                operation.finished = finished
                for tensor in (*operation.inputs, *operation.outputs):
                    tensor.record_stream(stream)

    def _change_process_sets(self, request: Request, detail: Any) -> None:
        if request.kind == ADD_PROCESS_SET:
            self.process_sets[detail] = request.ranks
        elif request.kind == REMOVE_PROCESS_SET:
            self.process_sets.pop(request.root, None)

    def _group(self, process_set: int) -> DataGroup:
        if process_set not in self._groups:
            ranks = self.process_sets[process_set]
            store = dist.PrefixStore(f"set{process_set}", self._store) if self._store else dist.HashStore()
            self._groups[process_set] = DataGroup(store, ranks, self.rank, self._settings.timeout_s)
        return self._groups[process_set]

    def _complete(self, operations: list[Operation], error: Exception | None) -> None:
        with self._lock:
            for operation in operations:
                if self._outstanding.get(operation.request.key) is operation:
                    del self._outstanding[operation.request.key]
        for operation in operations:
            operation.complete(error)

    # ---- failures

    def _report_failure(self, text: str) -> None:
        """Fails on this rank, and lets the others fail."""
        for rank in list(self._links.connections):
            self._links.send(rank, {"failed": text})
        self._fail(text)

    def _fail_or_forward(self, text: str) -> None:
        if self._negotiation is not None:
            self._report_failure(text)
        else:
            self._fail(text)

    def _fail(self, text: str) -> None:
        with self._lock:
            self._failure = self._failure or text
            operations = list(self._outstanding.values())
            self._outstanding, self._unsent, self._by_number = {}, [], {}
        for operation in operations:
            operation.complete(HorovodInternalError(text))
        if threading.current_thread() is self._thread:
            for group in self._groups.values():
                group.close()
