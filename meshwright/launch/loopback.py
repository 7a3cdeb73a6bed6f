"""How ranks on one machine meet without being reachable from another: a store on the loopback address."""

import socket
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

ADDRESS = "127.0.0.1"
_IFF_LOOPBACK = 0x8


def interface() -> str:
    """The name of the loopback interface, which Gloo and NCCL want to be told."""
    for _, name in socket.if_nameindex():
        try:
            flags = int(Path("/sys/class/net", name, "flags").read_text(), 16)
        except (OSError, ValueError):
            continue
        if flags & _IFF_LOOPBACK:
            return name
    return "lo"


def serve_store() -> tuple[dist.TCPStore, int]:
    """A store for local ranks and its port. A TCPStore left to itself binds every interface."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.bind((ADDRESS, 0))
    listening.listen(socket.SOMAXCONN)
    port = listening.getsockname()[1]
    store = dist.TCPStore(ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    return store, port


def connect_store(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
