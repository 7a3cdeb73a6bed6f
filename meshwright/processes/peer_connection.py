"""`PeerConnection`: a process group of exactly two processes. When one of them dies, only this connection breaks, and
the process that replaces the dead one opens a new connection."""

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from meshwright.errors import CollectiveError
from meshwright.processes import environment
from meshwright.processes.failure import NO_ANSWER
from meshwright.processes.heartbeat import describe_progress, heartbeat_file, read_heartbeat
from meshwright.processes.loopback import connect_store
from meshwright.processes.torch_private import gloo_group, set_default_timeout

# Opens a new connection to the store. A wait on a connection blocks all its users, so each thread has its own.
ConnectToStore = Callable[[], dist.Store]

_CONNECT_S = 30.0  # both processes run already when they connect
_TIMEOUT_MESSAGE = re.compile(r"timed? ?out", re.IGNORECASE)


class PeerLostError(CollectiveError):
    """The other process is gone."""


class PeerTimeoutError(CollectiveError):
    """The other process did not answer in time."""


class PeerConnection:
    """One end of a connection between two processes. `peer` is the name of the other process in error messages."""

    def __init__(
        self, store: dist.Store, first: bool, peer: str, timeout_s: float, wait_s: float | None = None
    ) -> None:
        """Waits until the other process connects, at most `wait_s` seconds. None means a default for a process that is
        running already. Exactly one of the two processes passes `first`. `timeout_s` limits each later send and
        receive."""
        self._peer = peer
        self._timeout_s = timeout_s
        self._peer_rank = 1 if first else 0
        try:
            wait = timedelta(seconds=wait_s or min(timeout_s, _CONNECT_S))
            self._group = gloo_group(store, 1 - self._peer_rank, 2, wait)
            set_default_timeout(self._group, timedelta(seconds=timeout_s))
        except (RuntimeError, ValueError) as error:
            raise self._explained(error, "connecting") from error

    def start_send(self, message: Tensor) -> Callable[[], None]:
        """Starts sending and returns a function that waits until the message is sent. Until then the message must not
        change."""
        return self._waiter(lambda: self._group.send([message], self._peer_rank, 0), "send")

    def start_receive(self, message: Tensor) -> Callable[[], None]:
        """Starts receiving and returns a function that waits until the message has arrived."""
        return self._waiter(lambda: self._group.recv([message], self._peer_rank, 0), "receive")

    def send(self, message: Tensor) -> None:
        self.start_send(message)()

    def receive(self, message: Tensor) -> None:
        self.start_receive(message)()

    def close(self) -> None:
        """Closes the connection. The other process notices this at once."""
        self._group = None

    def _waiter(self, start: Callable[[], dist.Work], operation: str) -> Callable[[], None]:
        try:
            work = start()
        except RuntimeError as error:
            raise self._explained(error, operation) from error

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._explained(error, operation) from error

        return wait

    def _explained(self, error: Exception, operation: str) -> CollectiveError:
        if _TIMEOUT_MESSAGE.search(str(error)):
            return PeerTimeoutError(f"{operation}: {NO_ANSWER} {self._timeout_s:g} s from {self._peer}")
        return PeerLostError(f"{operation}: the connection to {self._peer} broke")


def store_connector(attempt: int, timeout_s: float) -> ConnectToStore:
    """Returns a function that opens connections to the launcher's store. Keys get a prefix with the attempt, so that no
    rank reads keys of an earlier attempt."""
    address = environment.store_address()

    def connect() -> dist.Store:
        store = connect_store(*address, timedelta(seconds=timeout_s))
        return dist.PrefixStore(f"attempt{attempt}", store)

    return connect


def describe_last_heartbeat(folder: Path | None, rank: int) -> str:
    """Returns the end of a sentence, such as `, last seen at step 7 (backward)`; empty if this machine has no heartbeat
    of the rank."""
    heartbeat = read_heartbeat(heartbeat_file(folder, rank)) if folder is not None else None
    return f", last seen{describe_progress(heartbeat.step, heartbeat.activity)}" if heartbeat else ""
