"""What `--nodes`, `--node-rank` and `--rendezvous` say: on how many machines a job is started, which of them this is,
and at which address they find each other."""

import re
from dataclasses import dataclass

from meshwright.errors import InputError
from meshwright.numbers.limits import MOST_DEVICES

_HOST = re.compile(
    r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]{2,45}(?:%[\w.-]{1,15})?\]", re.ASCII
)
_NODES = re.compile(r"(\d{1,9})(?::(\d{1,9}))?", re.ASCII)
_LARGEST_PORT = 65_535


@dataclass(frozen=True)
class Address:
    """A host name or an IP address, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class NodeCount:
    """How many machines train together: as many as there are between `least` and `most`."""

    least: int
    most: int

    @property
    def is_elastic(self) -> bool:
        return self.least != self.most

    def __str__(self) -> str:
        return f"{self.least}:{self.most}" if self.is_elastic else str(self.least)


def parse_address(text: str) -> Address:
    """Returns the address of `--rendezvous HOST:PORT`; an IPv6 address stands in brackets."""
    host, colon, port = text.rpartition(":")
    if not colon or not host:
        raise InputError(f"--rendezvous {text!r}: write HOST:PORT, such as 10.0.0.1:29500")
    if not re.fullmatch(r"\d{1,5}", port, re.ASCII) or not 1 <= int(port) <= _LARGEST_PORT:
        raise InputError(f"--rendezvous {text!r}: the port is {port!r}: write a number from 1 to {_LARGEST_PORT}")
    if not _HOST.fullmatch(host):
        raise InputError(
            f"--rendezvous {text!r}: {host!r} is no host name or IP address; write an IPv6 address in brackets, as in"
            " [fd00::1]:29500"
        )
    return Address(host.strip("[]"), int(port))


def parse_node_count(text: str) -> NodeCount:
    """Returns the machines of `--nodes N` or `--nodes LEAST:MOST`."""
    match = _NODES.fullmatch(text)
    if match is None:
        raise InputError(f"--nodes {text!r}: write a number such as 2, or the least and the most, such as 2:4")
    least = int(match[1])
    most = int(match[2]) if match[2] else least
    if not 1 <= least <= most <= MOST_DEVICES:
        reason = f"{least} is more than {most}" if least > most else f"write numbers from 1 to {MOST_DEVICES:,}"
        raise InputError(f"--nodes {text}: {reason}")
    return NodeCount(least, most)


def check_node_rank(node_rank: int | None, nodes: NodeCount) -> int:
    """Returns the number of this machine. Raises an `InputError` if it is missing or too large."""
    if node_rank is None:
        if nodes.most == 1:
            return 0
        raise InputError(
            f"--nodes {nodes}: say which of the machines this is, with --node-rank 0 to {nodes.most - 1}; 0 is the one"
            " that has the address of --rendezvous"
        )
    if not 0 <= node_rank < nodes.most:
        raise InputError(
            f"--node-rank {node_rank}: with --nodes {nodes}, machines are numbered from 0 to {nodes.most - 1}"
        )
    return node_rank
