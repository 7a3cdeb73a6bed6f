"""`ProcessSetting`: a setting of torch for the whole process, which is made while it is needed, and then undone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from weakref import finalize


class ProcessSetting:
    """`make` makes the setting, and returns the function that undoes it. It is made for the first user, and undone
    when the last user is freed."""

    def __init__(self, make: Callable[[], Callable[[], object]]) -> None:
        self._make = make
        self._undo: Callable[[], object] | None = None
        self._users = 0
        self._lock = RLock()  # the garbage collector may free a user at any point, also within these methods

    @property
    def is_made(self) -> bool:
        return self._undo is not None

    def make_for(self, user: object) -> None:
        """Makes the setting until `user` is freed."""
        self._acquire()
        finalize(user, self._release).atexit = False

    @contextmanager
    def made(self) -> Iterator[None]:
        """The setting is made within this context. A function that torch compiles must not enter it."""
        self._acquire()
        try:
            yield
        finally:
            self._release()

    def _acquire(self) -> None:
        with self._lock:
            self._users += 1
            if self._undo is None:
                self._undo = self._make()

    def _release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._undo is not None:
                self._undo()
                self._undo = None
