"""Ranks on several machines exchange data through the interface that leads to the rendezvous."""

import errno
import os
import socket
import sys
from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.processes import loopback
from meshwright.processes.network import interface

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the routes of Linux")
ROUTES = """Iface	Destination	Gateway 	Flags	RefCnt	Use	Metric	Mask		MTU	Window	IRTT
docker0	000011AC	00000000	0001	0	0	0	0000FFFF	0	0	0
wlan0	00000000	0102A8C0	0003	0	0	600	00000000	0	0	0
eth7	00000000	0100A8C0	0003	0	0	100	00000000	0	0	0
"""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in interface.VARIABLES:
        monkeypatch.setenv(variable, "")  # so that it is restored after the test
        monkeypatch.delenv(variable)


def test_a_rendezvous_whose_name_is_a_loopback_address_here_means_the_default_route(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes = tmp_path / "route"
    routes.write_text(ROUTES)
    known = [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", 9))]  # Debian's /etc/hosts
    monkeypatch.setattr(interface, "_ROUTES", routes)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: known)
    interface.use_interface_towards("node1")
    assert {os.environ[variable] for variable in interface.VARIABLES} == {"eth7"}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_loopback_address_means_the_loopback_interface(host: str) -> None:
    assert interface.interface_variables(host) == dict.fromkeys(interface.VARIABLES, loopback.interface())


def test_without_a_route_the_libraries_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    assert interface.interface_variables("10.0.0.1") == {}


def test_an_address_of_this_machine_means_its_interface() -> None:
    addresses = {address: name for address, name in interface._addresses_4().items() if name != "lo"}
    if not addresses:
        pytest.skip("this machine has no other address than the loopback's")
    for address, name in addresses.items():
        assert name in [each for _, each in socket.if_nameindex()]
        assert interface.interface_towards(address) == name


def test_the_users_choice_is_kept_and_holds_for_both_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    interface.use_interface_towards("nowhere.invalid")
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"


def test_nccls_own_patterns_are_not_given_to_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker0")
    monkeypatch.setattr(interface, "interface_towards", lambda host: "eth7")
    interface.use_interface_towards("10.0.0.1")
    assert [os.environ[variable] for variable in interface.VARIABLES] == ["eth7", "^docker0"]


def test_a_rendezvous_that_is_not_known_is_named() -> None:
    with pytest.raises(InputError, match=r"the rendezvous is nowhere\.invalid, which is not known on this machine"):
        interface.use_interface_towards("nowhere.invalid")
