"""Two processes that talk to each other alone: when one dies only what they had in common breaks, and whoever comes
in its place makes a pair of its own."""

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from meshwright.errors import CollectiveError
from meshwright.launch import environment
from meshwright.launch.failure import NO_ANSWER
from meshwright.launch.loopback import connect_store
from meshwright.launch.place import describe, place_file, read_place

Connect = Callable[[], dist.Store]  # a connection of one's own: waiting on it keeps nobody else from the store

_CONNECT_S = 30.0  # both are there already when a pair is made
_LATE = re.compile(r"timed? ?out", re.IGNORECASE)


class Broken(CollectiveError):
    """The other one is gone."""


class Late(CollectiveError):
    """The other one is there, and does not answer."""


class Pair:
    """One end of it. `peer` is what the other one is called in an error."""

    def __init__(
        self, store: dist.Store, first: bool, peer: str, timeout_s: float, wait_s: float | None = None
    ) -> None:
        """Waits for the other end; `wait_s` where that is still to be started."""
        self._peer = peer
        self._timeout_s = timeout_s
        self._other = 1 if first else 0
        try:
            wait = timedelta(seconds=wait_s or min(timeout_s, _CONNECT_S))
            # What torch says of its own groups leaves out what they do.
            self._group: Any = dist.ProcessGroupGloo(store, 1 - self._other, 2, wait)
            self._group._set_default_timeout(timedelta(seconds=timeout_s))
        except (RuntimeError, ValueError) as error:
            raise self._told(error, "connecting") from error

    def start_send(self, message: Tensor) -> Callable[[], None]:
        """What is returned waits until it is sent; until then the message must not change."""
        return self._started(lambda: self._group.send([message], self._other, 0), "send")

    def start_receive(self, message: Tensor) -> Callable[[], None]:
        return self._started(lambda: self._group.recv([message], self._other, 0), "receive")

    def send(self, message: Tensor) -> None:
        self.start_send(message)()

    def receive(self, message: Tensor) -> None:
        self.start_receive(message)()

    def close(self) -> None:
        """The other one notices at once."""
        self._group = None

    def _started(self, start: Callable[[], dist.Work], doing: str) -> Callable[[], None]:
        try:
            work = start()
        except RuntimeError as error:
            raise self._told(error, doing) from error

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._told(error, doing) from error

        return wait

    def _told(self, error: Exception, doing: str) -> CollectiveError:
        if _LATE.search(str(error)):
            return Late(f"{doing}: {NO_ANSWER} {self._timeout_s:g} s from {self._peer}")
        return Broken(f"{doing}: the connection to {self._peer} broke")


def own_connection(attempt: int, timeout_s: float) -> Connect:
    """Connections to the launcher's store, with names of this attempt only."""
    address = environment.store_address()

    def connect() -> dist.Store:
        store = connect_store(*address, timedelta(seconds=timeout_s))
        return dist.PrefixStore(f"attempt{attempt}", store)

    return connect


def last_seen(folder: Path | None, rank: int) -> str:
    """`, last seen at step 7 (backward)`, as far as this machine knows."""
    seen = read_place(place_file(folder, rank)) if folder is not None else None
    return f", last seen{describe(seen.step, seen.doing)}" if seen else ""
