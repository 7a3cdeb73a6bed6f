"""The network interface by which this machine reaches another one."""

import fcntl
import socket
import struct
from pathlib import Path

from meshwright.errors import InputError
from meshwright.launch.nodes.address import Address

_SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface


def interface_towards(address: Address) -> str | None:
    """Returns the name of the interface that packets to this address leave by; None if it cannot be found. Nothing is
    sent."""
    try:
        family, _, _, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise InputError(f"--rendezvous {address}: {address.host} is not known here: {error.strerror}") from None
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(place)
        except OSError:
            return None
        own = probe.getsockname()[0]
        names = [name for _, name in socket.if_nameindex()]
        if family == socket.AF_INET:
            # An address may be on several interfaces under one name, such as a bridge's; the first one has it.
            return next((name for name in names if _ipv4(probe, name) == own), "lo" if own.startswith("127.") else None)
    return _ipv6_interfaces().get(socket.inet_pton(socket.AF_INET6, own.partition("%")[0]))


def _ipv4(probe: socket.socket, name: str) -> str | None:
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6_interfaces() -> dict[bytes, str]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return {}
    return {bytes.fromhex(line.split()[0]): line.split()[-1] for line in lines}
