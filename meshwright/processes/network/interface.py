"""The network interface through which ranks exchange data. Gloo and NCCL listen on an interface that they choose
themselves unless a variable names one: Gloo takes the address of the host name, which is a loopback address on many
machines, and NCCL may take the bridge of a container engine. Ranks on several machines have one address that all of
them reach, that of the rendezvous, so they use the interface that leads there.

    another machine's address   the interface of the local address that a packet to it would have
    an address of this machine  the interface that has it
    a loopback address          the loopback interface; but if a name stands for it here, as Debian's /etc/hosts has it
                                for a machine's own name, the interface of the default route
"""

import fcntl
import ipaddress
import os
import socket
import struct
import sys
from pathlib import Path

from meshwright.errors import InputError
from meshwright.processes import loopback

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915  # Linux's request for the IPv4 address of an interface
_ROUTES, _ADDRESSES_6 = Path("/proc/net/route"), Path("/proc/net/if_inet6")


def use_interface(name: str) -> None:
    """Makes Gloo and NCCL use this interface, unless the user has named one."""
    for variable in VARIABLES:
        os.environ.setdefault(variable, name)


def use_interface_towards(host: str) -> None:
    """Makes Gloo and NCCL use the interface that leads to this host."""
    os.environ.update(interface_variables(host))


def interface_variables(host: str) -> dict[str, str]:
    """The variables that make Gloo and NCCL use the interface that leads to this host, without those that the user has
    set. If one of these names an interface, both libraries use that one. Where no interface can be found, the libraries
    choose."""
    missing = [variable for variable in VARIABLES if not os.environ.get(variable)]
    if not missing or sys.platform != "linux":
        return {}
    interfaces = [name for _, name in socket.if_nameindex()]
    chosen = next((os.environ[name] for name in VARIABLES if os.environ.get(name) in interfaces), None)
    name = chosen or interface_towards(host)
    return dict.fromkeys(missing, name) if name is not None else {}


def interface_towards(host: str) -> str | None:
    """The name of the interface through which this machine reaches a host, or through which other machines reach this
    one if the host is this machine. None if there is no route to it at present."""
    address = _local_address_towards(host)
    if address is None:
        return None
    if address.is_loopback:
        return loopback.interface() if _is_loopback_itself(host) else default_interface()
    return _interface_of(address)


def _is_loopback_itself(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        return False


def _local_address_towards(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The local address of a packet to the host; None without a route. Nothing is sent: connecting a datagram socket
    only looks up the route."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise InputError(
            f"the address of the rendezvous is {host}, which is not known on this machine ({error.strerror}): set"
            " MASTER_ADDR, or the rendezvous of your launcher, to an address that all machines know"
        ) from None
    with socket.socket(family, kind, protocol) as datagrams:
        try:
            datagrams.connect(target)
        except OSError:  # the network may be back before the ranks need it
            return None
        return ipaddress.ip_address(datagrams.getsockname()[0].partition("%")[0])


def _interface_of(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    addresses = _addresses_4() if address.version == 4 else _addresses_6()
    return addresses.get(str(address))


def _addresses_4() -> dict[str, str]:
    """The names of interfaces by their first IPv4 address."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as request_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(request_socket.fileno(), _SIOCGIFADDR, request)
            except OSError:  # the interface has no IPv4 address
                continue
            addresses[socket.inet_ntoa(answer[20:24])] = name
    return addresses


def _addresses_6() -> dict[str, str]:
    addresses = {}
    for line in _ADDRESSES_6.read_text().splitlines():
        digits, *_, name = line.split()
        addresses[str(ipaddress.IPv6Address(int(digits, 16)))] = name
    return addresses


def named_interfaces() -> dict[str, str]:
    """The interfaces that the variables of Gloo and NCCL name, by variable."""
    return {variable: value for variable in VARIABLES if (value := os.environ.get(variable))}


def default_interface() -> str | None:
    """The interface of the default route with the lowest metric; None if there is none."""
    try:
        rows = [line.split() for line in _ROUTES.read_text().splitlines()[1:]]
    except OSError:
        return None
    routes = [(int(row[6]), row[0]) for row in rows if row[1] == "00000000" and row[7] == "00000000"]
    return min(routes)[1] if routes else None
