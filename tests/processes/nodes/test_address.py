"""What `--nodes`, `--node-rank` and `--rendezvous` may say."""

import pytest

from meshwright.errors import InputError
from meshwright.processes.nodes.address import (
    Address,
    NodeCount,
    check_node_rank,
    parse_address,
    parse_node_count,
)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1:29500", Address("10.0.0.1", 29500)),
        ("node-1.cluster:1", Address("node-1.cluster", 1)),
        ("[fd00::1]:65535", Address("fd00::1", 65535)),
    ],
)
def test_addresses_are_read_and_written(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("host", "write HOST:PORT"),
        (":29500", "write HOST:PORT"),
        ("host:", "the port is ''"),
        ("host:ssh", "the port is 'ssh'"),
        ("host:0", "a number from 1 to 65535"),
        ("host:65536", "a number from 1 to 65535"),
        ("host:١", "the port is"),
        ("fd00::1:29500", "in brackets"),
        ("-oProxy=x:1", "no host name"),
        ("a b:1", "no host name"),
        ("a;id:1", "no host name"),
    ],
)
def test_other_addresses_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        parse_address(text)


def test_node_counts_and_ranks() -> None:
    assert parse_node_count("2") == NodeCount(2, 2)
    assert parse_node_count("2:4") == NodeCount(2, 4)
    assert str(parse_node_count("2:4")) == "2:4"
    assert check_node_rank(3, NodeCount(2, 4)) == 3
    for text, complaint in [("4:2", "4 is more than 2"), ("0", "from 1 to"), ("x", "write a number"), ("2:", "write")]:
        with pytest.raises(InputError, match=complaint):
            parse_node_count(text)
    for rank, complaint in [(2, "numbered from 0 to 1"), (-1, "numbered from 0"), (None, "with --node-rank 0 to 1")]:
        with pytest.raises(InputError, match=complaint):
            check_node_rank(rank, NodeCount(2, 2))
