"""A store on the loopback address, through which the ranks of one machine find each other. No other machine can reach
it, and no other user of this one."""

import socket
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from meshwright.processes.network.own_user import admit_own_user_only

ADDRESS = "127.0.0.1"
_IFF_LOOPBACK = 0x8


def interface() -> str:
    """Returns the name of the loopback interface, which Gloo and NCCL need instead of its address."""
    for _, name in socket.if_nameindex():
        try:
            flags = int(Path("/sys/class/net", name, "flags").read_text(), 16)
        except (OSError, ValueError):
            continue
        if flags & _IFF_LOOPBACK:
            return name
    return "lo"


def serve_store() -> tuple[dist.TCPStore, int]:
    """Starts a store for local ranks, and returns it and its port. The listening socket is created here, because a
    TCPStore would listen on every interface."""
    admit_own_user_only()
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((ADDRESS, 0))
    listener.listen(socket.SOMAXCONN)
    port = listener.getsockname()[1]
    store = dist.TCPStore(ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port


def connect_store(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
