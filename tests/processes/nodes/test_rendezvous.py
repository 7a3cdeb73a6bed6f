"""Machines that meet in a store: who listens where, what a stranger can do, and which commands do not fit together."""

import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousState

from meshwright.errors import InputError, RankError, Stopped
from meshwright.processes.nodes.address import Address, NodeCount
from meshwright.processes.nodes.rendezvous import Node, join_rendezvous, reach_store, serve_store
from meshwright.processes.nodes.rendezvous_state import JsonBackend
from meshwright.processes.token.signed_store import SignedStore
from tests.processes.nodes.ports import free_port
from tests.processes.token.stranger import put

TWO = NodeCount(2, 2)


def node(rank: int, nodes: NodeCount = TWO, job: str = "toy") -> Node:
    return Node(rank, nodes, Address("127.0.0.1", 29500), job, 1)


def signed_store() -> SignedStore:
    return SignedStore(dist.HashStore(), b"key")


def do_nothing() -> None:
    pass


def listening_addresses(port: int) -> set[str]:
    """Returns the addresses at which a process of this machine listens on the port, as the kernel writes them."""
    lines = [line.split() for file in ("tcp", "tcp6") for line in Path("/proc/net", file).read_text().splitlines()[1:]]
    places = [words[1].split(":") for words in lines if words[3] == "0A"]
    return {address for address, number in places if int(number, 16) == port}


def test_the_store_listens_at_the_given_address_only() -> None:
    address = Address("127.0.0.1", free_port())
    store = serve_store(address)
    assert listening_addresses(address.port) == {"0100007F"}
    reach_store(address, 10, do_nothing).set("a", "b")
    assert store.get("a") == b"b"
    with pytest.raises(InputError, match=f"port {address.port} is in use on this machine"):
        serve_store(address)
    with pytest.raises(InputError, match=r"this machine \(--node-rank 0\) has no address 192.0.2.1"):
        serve_store(Address("192.0.2.1", address.port))


def test_a_store_that_nobody_serves_is_waited_for() -> None:
    address = Address("127.0.0.1", free_port())
    with pytest.raises(RankError, match=r"no answer from --rendezvous .* within train.timeout_s \(0.1 s\)"):
        reach_store(address, 0.1, do_nothing)

    def stop() -> None:
        raise Stopped("stopped by SIGTERM")

    with pytest.raises(Stopped):
        reach_store(address, 1000, stop)
    with pytest.raises(Stopped):
        join_rendezvous(node(0), signed_store(), 1000, stop).next_rendezvous()


class Attack:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("a stranger's pickle was executed",))


@pytest.mark.parametrize("written", [pickle.dumps(Attack()), b"{}", b"null", b'{"round": "x"}', b"\xff", None])
def test_a_state_that_a_stranger_writes_repeats_or_deletes_is_replaced(
    written: bytes | None, capfd: pytest.CaptureFixture[str]
) -> None:
    store = signed_store()
    backend = JsonBackend(store, do_nothing)
    assert backend.get_state() is None
    state = _RendezvousState()
    for number in range(3):
        state.round = number
        earlier = store.get("rendezvous")
        current = backend.get_state()
        assert backend.set_state(pickle.dumps(state), current and current[1])
    for stranger in (written, earlier):
        if stranger is None:
            store.delete_key("rendezvous")
        else:
            put(store, "rendezvous", stranger)
        restored = backend.get_state()
        assert restored is not None
        assert pickle.loads(restored[0]).round == 2
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1] == "refused: a stranger has repeated an earlier state of the rendezvous"
    assert written is None or "'rendezvous' in the store of the ranks was not written with the token" in lines[0]


def test_a_machine_that_has_seen_no_state_waits_until_another_one_has_replaced_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = signed_store()
    first, second = JsonBackend(store, do_nothing), JsonBackend(store, do_nothing)
    written = first.set_state(pickle.dumps(_RendezvousState()))
    assert written is not None
    store.set("rendezvous", "of a stranger")
    monkeypatch.setattr("time.sleep", lambda _: first.get_state())
    assert second.get_state() == written[:2]
    monkeypatch.setattr("time.sleep", lambda _: None)
    store.set("rendezvous", "of a stranger")
    with pytest.raises(RendezvousStateError, match="a stranger writes the state of the rendezvous"):
        JsonBackend(store, do_nothing).get_state()


def meet(*nodes: Node) -> list[Any]:
    """Lets the machines meet twice in one store. Returns for each machine its place, the number of machines and the
    round of each meeting, or the error that it raises."""
    address = Address("127.0.0.1", free_port())
    served = serve_store(address)
    stores = [SignedStore(reach_store(address, 30, do_nothing), b"key") for _ in nodes]

    def join(machine: Node, store: SignedStore) -> Any:
        rendezvous = join_rendezvous(machine, store, 30, do_nothing)
        try:
            first = rendezvous.next_rendezvous()
            first_round = rendezvous.round
            second = rendezvous.next_rendezvous()
        except InputError as error:
            return str(error)
        finally:
            rendezvous._stop_heartbeats()
        return [(first.rank, first.world_size, first_round), (second.rank, second.world_size, rendezvous.round)]

    with ThreadPoolExecutor(len(nodes)) as threads:
        outcomes = list(threads.map(join, nodes, stores))
    del served
    return outcomes


def test_machines_keep_their_numbers_and_count_the_rounds() -> None:
    assert meet(node(1), node(0)) == [[(1, 2, 0), (1, 2, 1)], [(0, 2, 0), (0, 2, 1)]]


def test_a_number_that_two_machines_have_is_refused_on_both() -> None:
    errors = meet(node(0), node(0))
    assert errors == ["--node-rank 0 was given on two machines: give each another number"] * 2


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        (node(1, NodeCount(2, 4)), "--nodes is 2:4 here (--node-rank 1), but 2 on the machine that came first"),
        (node(1, job="mnist"), "the job's name is mnist here (--node-rank 1), but toy on the machine that came first"),
    ],
)
def test_a_command_that_differs_from_the_first_one_is_refused(other: Node, complaint: str) -> None:
    store = signed_store()
    join_rendezvous(node(0), store, 30, do_nothing)
    with pytest.raises(InputError, match=re.escape(complaint)):
        join_rendezvous(other, store, 30, do_nothing)
