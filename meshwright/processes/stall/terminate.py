"""Calls a function before an exception in a thread of a C++ library ends the process. Gloo throws one if ranks send
tensors of different sizes, and NCCL one after a timeout; Python sees neither."""

import atexit
import ctypes
import sys
from collections.abc import Callable
from contextlib import suppress

_SET_TERMINATE = "_ZSt13set_terminatePFvvE"  # std::set_terminate(void (*)())
_GET_TERMINATE = "_ZSt13get_terminatev"
_HANDLER = ctypes.CFUNCTYPE(None)


class TerminateHook:
    """While it is set, `called` is called in the thread whose exception ends the process. Then the process ends as it
    would have without it. Nothing happens on systems without libstdc++."""

    def __init__(self, called: Callable[[], None]) -> None:
        self._called: Callable[[], None] | None = called
        self._handler = _HANDLER(self._run)
        self._address = ctypes.cast(self._handler, ctypes.c_void_p).value
        self._library: ctypes.CDLL | None = None
        self._previous: int | None = None

    def set(self) -> None:
        if sys.platform != "linux":
            return
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL("libstdc++.so.6")
            set_handler, get_handler = getattr(library, _SET_TERMINATE), getattr(library, _GET_TERMINATE)
            set_handler.restype = get_handler.restype = ctypes.c_void_p
            set_handler.argtypes = [ctypes.c_void_p]
            self._library, self._previous = library, set_handler(self._address)
            # Python cannot be called any more after its end, when threads of torch may still end the process.
            atexit.register(self.remove)

    def remove(self) -> None:
        """Restores the handler before this one. If another hook was set since then, this one stays as a link between
        both; `atexit` keeps it in memory."""
        self._called = None
        if self._library is None or getattr(self._library, _GET_TERMINATE)() != self._address:
            return
        getattr(self._library, _SET_TERMINATE)(self._previous)
        self._library = None
        atexit.unregister(self.remove)

    def _run(self) -> None:
        with suppress(BaseException):
            if self._called is not None:
                self._called()
        if self._previous:
            _HANDLER(self._previous)()  # prints the exception, and ends the process
