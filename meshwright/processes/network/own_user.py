"""Keeps processes of other users of this machine out. Ports of the loopback address are open to every user. The kernel
knows which user has opened the socket at the other end of a connection, if it is on this machine, so that nobody can
pretend to be this user.

    accept_own_user(listener)    for what Meshwright itself listens on
    admit_own_user_only()        before torch listens anywhere: its store and Gloo take every process that connects for
                                 one of theirs. The functions that torch calls to accept connections are replaced in its
                                 table of functions of other libraries, by which the dynamic linker connects libraries.
                                 (NCCL has listening sockets of its own, which are left as they are.)

Connections from other machines are admitted. So are all connections where there is no C compiler, and on systems other
than Linux, which do not say who has opened a socket. It was tried with torch 2.13 on x86-64.
"""

import ctypes
import socket
import sys
from enum import Enum
from functools import cache
from pathlib import Path

from meshwright.files import compiled


class OtherEnd(Enum):
    """Who is at the other end, with the numbers of own_user.c: a process of this user, or of another user of this
    machine; nobody any more; or it is another machine, or it cannot be known."""

    UNKNOWN = 0
    THIS_USER = 1
    ANOTHER_USER = 2
    GONE = 3


def _check(library: ctypes.CDLL) -> str | None:
    for name in ("other_end", "guard_torch", "report_refusal"):
        getattr(library, name)
    return None


SOURCE = compiled.Source(Path(__file__).with_suffix(".c"), (), _check)


@cache
def _library() -> ctypes.CDLL | None:
    """Returns the compiled `own_user.c`; None if it cannot be compiled, or the kernel does not say who connects."""
    if sys.platform != "linux" or isinstance(library := compiled.load(SOURCE), str):
        return None
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname()),
            listener.accept()[0] as here,
        ):
            return library if library.other_end(here.fileno()) == OtherEnd.THIS_USER.value else None
    except OSError:
        return None


def find_other_end(connection: socket.socket) -> OtherEnd:
    library = _library()
    return OtherEnd.UNKNOWN if library is None else OtherEnd(library.other_end(connection.fileno()))


def accept_own_user(listener: socket.socket) -> tuple[socket.socket, tuple[str, int]] | None:
    """Accepts a connection, and returns it and the address of its other end; None if that is a process of another user,
    whose connection is closed. Who has closed it again already may have been anybody."""
    connection, address = listener.accept()
    if find_other_end(connection) is not OtherEnd.ANOTHER_USER:
        return connection, address
    connection.close()
    library = _library()
    assert library is not None
    library.report_refusal()
    return None


@cache
def admit_own_user_only() -> bool:
    """Returns whether torch refuses processes of other users from now on."""
    library = _library()
    if library is None:
        return False
    import torch  # noqa: F401  # loads the library of torch

    return int(library.guard_torch()) > 0
