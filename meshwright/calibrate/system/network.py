"""The network interfaces of this machine: which of them ranks use, and whether ranks can connect to each other."""

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.processes import loopback
from meshwright.processes.network.interface import default_interface, named_interfaces

_WAIT_S = 5.0


@dataclass(frozen=True)
class Network:
    """`interfaces` are the names of all interfaces. `local` is the one that ranks of this machine use, `between` the
    one of the default route, which ranks of several machines use unless the rendezvous leads to another; empty if there
    is none. `named` are the interfaces that variables name, by variable. `connection_problem` says why a process cannot
    connect to a port of the local interface; empty if it can."""

    interfaces: tuple[str, ...]
    local: str
    between: str
    named: tuple[tuple[str, str], ...]
    connection_problem: str


def inspect_network() -> Network:
    return Network(
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        local=loopback.interface(),
        between=default_interface() or "",
        named=tuple(named_interfaces().items()),
        connection_problem=_connect(loopback.ADDRESS),
    )


def network_problems(network: Network) -> Iterator[str]:
    """Yields one line for each problem of the network."""
    if network.connection_problem:
        yield (
            f"ranks cannot connect to each other on {network.local} ({loopback.ADDRESS}): {network.connection_problem};"
            " allow connections on the loopback interface (ip link set lo up; the firewall of a container)"
        )
    for variable, value in network.named:
        if not _exists(value, network.interfaces):
            yield (
                f"{variable} is {value}, but this machine has the interfaces {', '.join(network.interfaces)}: set it to"
                " one of these, or unset it"
            )


def _exists(value: str, interfaces: Sequence[str]) -> bool:
    """Whether the machine has an interface that a variable names. What it names may be the beginning of a name, and `^`
    excludes names, as NCCL reads them."""
    beginnings = tuple(name.lstrip("=").partition(":")[0] for name in value.split(","))
    return value.startswith("^") or any(name.startswith(beginnings) for name in interfaces)


def _connect(address: str) -> str:
    """Opens a port at an address of this machine, connects to it and sends a byte. Returns what went wrong, or an empty
    text."""
    try:
        with socket.create_server((address, 0)) as listener:
            listener.settimeout(_WAIT_S)
            with socket.create_connection(listener.getsockname(), timeout=_WAIT_S) as client:
                server, _ = listener.accept()
                with server:
                    client.sendall(b"1")
                    return "" if server.recv(1) == b"1" else "a byte was lost"
    except OSError as error:
        return error.strerror or str(error)
