"""The connection of a worker of an elastic job to its launcher, which gives out ranks and tells when the number of
workers changes."""

import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from meshwright.compat.horovod.engine.frames import FrameReader, send_frame
from meshwright.compat.horovod.variables import HorovodVariables

Listener = Callable[[float, int], None]


class DriverLink:
    """The connection of this process. `listeners` are called, from a thread, with the time and kind of each change of
    hosts (`HostUpdateResult`). `lost` is the last attempt of which the launcher knows that a worker has died."""

    def __init__(self, address: tuple[str, int], worker: str) -> None:
        self.listeners: list[Listener] = []
        self.lost = -1
        self.attempt = -1
        self._assignments: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._connection = socket.create_connection(address, 60.0)
        self._connection.settimeout(None)
        send_frame(self._connection, {"worker": worker})
        threading.Thread(target=self._listen, name="elastic driver", daemon=True).start()

    def join(self) -> dict[str, Any]:
        """Says that this worker is ready for a new start, waits for the others, and returns its assignment. Ends the
        process if the job goes on without it."""
        send_frame(self._connection, {"join": self.attempt})
        assignment = self._assignments.get()
        if assignment is None:
            raise ConnectionError("the launcher of this job is gone")
        if assignment.get("exit"):
            raise SystemExit(0)
        self.attempt = int(assignment["attempt"])
        return assignment

    def _listen(self) -> None:
        reader = FrameReader(self._connection)
        while True:
            try:
                frame = reader.one()
            except OSError:
                self._assignments.put(None)
                return
            if "lost" in frame:
                self.lost = frame["lost"]
            elif "update" in frame:
                for listener in list(self.listeners):
                    listener(time.time(), frame["update"])
            else:
                self._assignments.put(frame)


@cache
def _link(address: tuple[str, int], worker: str, process: int) -> DriverLink:
    return DriverLink(address, worker)


def driver_link(variables: HorovodVariables) -> DriverLink | None:
    """Returns the connection to the launcher of this elastic job; None if the job is not elastic."""
    if variables.driver is None:
        return None
    return _link(variables.driver, variables.worker, os.getpid())


def join_job(variables: HorovodVariables) -> tuple[HorovodVariables, str]:
    """Waits until all workers of an elastic job are ready. Returns the variables with this worker's new rank, and the
    name of the attempt."""
    link = driver_link(variables)
    assert link is not None
    assigned = link.join()
    changed = replace(
        variables,
        rank=assigned["rank"],
        size=assigned["size"],
        local_rank=assigned["rank"],
        local_size=assigned["size"],
        cross_rank=0,
        cross_size=1,
    )
    return changed, f"attempt{link.attempt}"


def lost_worker(variables: HorovodVariables) -> str | None:
    """Returns a sentence if a worker of the current attempt has died; None if all live, or the job is not elastic."""
    link = driver_link(variables)
    if link is None or link.lost < link.attempt:
        return None
    return "a worker of this job has died"
