"""Lets a process of another user (`stranger.py`) attack what a process and its descendants listen on while they run."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.processes.processes import tree

_POLL_S = 0.005


@dataclass
class Attack:
    """What the stranger has tried and reached; known when the context of `attacked` has ended. `root_ports` are those
    of the attacked process itself, without its descendants."""

    tries: int = 0
    reached: dict[str, int] = field(default_factory=dict)
    ports: set[int] = field(default_factory=set)
    root_ports: set[int] = field(default_factory=set)


@contextmanager
def attacked(root: int, folder: Path | None = None, on_root: Mapping[str, Any] | None = None) -> Iterator[Attack]:
    """Attacks the process `root`, its descendants, and the files of a folder until the end of the context. What
    is said about the ports of `root` itself (stranger.py) is `on_root`."""
    attack, end = Attack(), threading.Event()
    command = [sys.executable, str(Path(__file__).with_name("stranger.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdin is not None
        if folder is not None:
            _tell(stranger, {"folder": str(folder)})
        watch = threading.Thread(target=_watch, args=(root, attack, stranger, end, on_root))
        watch.start()
        try:
            yield attack
        finally:
            end.set()
            watch.join()
            out, _ = stranger.communicate(timeout=60)
        assert stranger.returncode == 0
    result = json.loads(out)
    attack.tries, attack.reached = result["tries"], result["reached"]


def _tell(stranger: "subprocess.Popen[str]", target: dict[str, object]) -> None:
    assert stranger.stdin is not None
    stranger.stdin.write(json.dumps(target) + "\n")
    stranger.stdin.flush()


def _watch(
    root: int,
    attack: Attack,
    stranger: "subprocess.Popen[str]",
    end: threading.Event,
    on_root: Mapping[str, Any] | None,
) -> None:
    """Tells the stranger of new processes and ports: where ranks listen while they connect to each other matters."""
    known: set[int] = set()
    while not end.wait(_POLL_S):
        processes = tree(root)
        for pid in processes - known:
            _tell(stranger, {"pid": pid})
        known |= processes
        opened = listening_ports(processes) - attack.ports
        attack.root_ports |= listening_ports({root})
        for port in opened:
            attack.ports.add(port)
            _tell(stranger, {"port": port, **(on_root or {} if port in attack.root_ports else {})})


def listening_ports(pids: set[int]) -> set[int]:
    sockets: set[str] = set()
    for pid in pids:
        try:
            links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        sockets |= {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in sockets}
