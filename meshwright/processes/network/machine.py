"""Which machine a process is on, and ranks in the order of machines.

The axes of a plan with the most traffic are the innermost ones of the mesh: consecutive ranks. Launchers may number
ranks across machines in turn (`mpirun --map-by node`, `srun --distribution=cyclic`), so ranks are numbered anew,
machine by machine, before they make their process group. Most launchers number them so already.
"""

import json
import os
import socket
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from meshwright.processes.token.signed_store import read, read_many, write

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


def machine_name() -> str:
    """A text that all ranks of this machine have in common, and no rank of another machine. Containers of one host are
    several machines if each has a network of its own."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    network = os.stat(_NETWORK).st_ino if _NETWORK.exists() else 0
    return f"{socket.gethostname()} {boot} {network}"


def rank_by_machine(
    rank: int, size: int, store: dist.Store, timeout_s: float, machine: str | None = None
) -> tuple[int, int]:
    """Returns the number that this rank has if all are numbered machine by machine, and how many ranks its machine has:
    the machines in the order of their lowest ranks, and the ranks of each in their order. All ranks call this.
    `machine` is this machine's name."""
    here = machine or machine_name()
    write(store, f"machine/{rank}", here)
    if rank == 0:
        keys = [f"machine/{other}" for other in range(size)]
        store.wait(keys, timedelta(seconds=timeout_s))
        machines = [name.decode() for name in read_many(store, keys)]
        write(store, "machines", json.dumps({"order": order_by_machine(machines), "ranks": Counter(machines)}))
    store.wait(["machines"], timedelta(seconds=timeout_s))
    result = json.loads(read(store, "machines"))
    order: list[int] = result["order"]
    return order.index(rank) if order else rank, result["ranks"][here]


def order_by_machine(machines: list[str]) -> list[int]:
    """Returns the ranks in the order of their machines, for the machine of each rank; empty if they are in this order
    already."""
    first = {machine: machines.index(machine) for machine in set(machines)}
    order = sorted(range(len(machines)), key=lambda rank: (first[machines[rank]], rank))
    return [] if order == sorted(order) else order
