"""Messages between processes over a socket: JSON texts after their lengths. JSON, because reading a pickle can execute
code."""

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!I")
_CHUNK = 65536
_MOST_BYTES = 1 << 30


def send_frame(connection: socket.socket, value: Any) -> None:
    data = json.dumps(value, separators=(",", ":")).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


class FrameReader:
    """Reads the frames of one connection. One that is longer than `most_bytes`, or no JSON, is a `ValueError`, or the
    end of the connection: the other side is none of ours."""

    def __init__(self, connection: socket.socket, most_bytes: int = _MOST_BYTES) -> None:
        self._connection = connection
        self._most_bytes = most_bytes
        self._data = bytearray()

    def available(self) -> list[Any] | None:
        """Receives once, and returns the frames that are complete; None if the other side has closed the
        connection."""
        try:
            received = self._connection.recv(_CHUNK)
        except (ConnectionError, OSError):
            received = b""
        if not received:
            return None
        self._data += received
        frames = []
        try:
            while (frame := self._next()) is not None:
                frames.append(frame)
        except (ValueError, RecursionError):
            return None
        return frames

    def one(self) -> Any:
        """Waits for the next frame and returns it. Raises `ConnectionError` if the connection is closed before."""
        while (frame := self._next()) is None:
            received = self._connection.recv(_CHUNK)
            if not received:
                raise ConnectionError("the connection was closed")
            self._data += received
        return frame

    def _next(self) -> Any | None:
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        if length > self._most_bytes:
            raise ValueError(f"a message of {length:,} bytes: at most {self._most_bytes:,} are read")
        end = _LENGTH.size + length
        if len(self._data) < end:
            return None
        frame = json.loads(bytes(self._data[_LENGTH.size : end]))
        del self._data[:end]
        return frame
