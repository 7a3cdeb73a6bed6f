"""Reads from /proc which processes a test started and on which addresses they listen."""

import os
import time
from collections.abc import Callable
from pathlib import Path

LIMIT_S = 60.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {LIMIT_S:g} s: {what}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False


def tree(root: int) -> set[int]:
    """Returns the process `root` and all its descendants."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    descendants = {root}
    while more := {pid for pid, parent in parents.items() if parent in descendants} - descendants:
        descendants |= more
    return descendants


def listening(pids: set[int]) -> set[str]:
    """Returns the addresses on which these processes accept connections, in the hexadecimal form of /proc."""
    sockets: set[str] = set()
    for pid in pids:
        try:
            links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        sockets |= {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    addresses: set[str] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                addresses.add(fields[1].partition(":")[0])
    return addresses
