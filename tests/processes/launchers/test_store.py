"""Where ranks find their store, and how they connect to it: by a file on one machine, at MASTER_ADDR and MASTER_PORT,
or where Slurm's variables say. Threads stand for ranks."""

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from meshwright.errors import CollectiveError, InputError
from meshwright.processes.launchers.launched_rank import LaunchedRank
from meshwright.processes.launchers.store import open_store
from meshwright.processes.launchers.store_place import StorePlace, find_store_place
from meshwright.processes.launchers.table import read_launched_rank
from meshwright.processes.token.admission import describe_ranks
from tests.processes.launchers.test_table import MPICH, OPEN_MPI, SRUN, TORCHRUN

TIMEOUT_S = 30.0


@pytest.fixture
def private_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def place_of(variables: dict[str, str]) -> StorePlace:
    rank = read_launched_rank(variables)
    assert rank is not None
    return find_store_place(rank, variables)


def local_rank(rank: int, size: int) -> LaunchedRank:
    return LaunchedRank("mpirun", rank, size, rank, size, "PMI_RANK")


def exchange(size: int, place: StorePlace) -> list[bytes]:
    """Ranks in threads connect to the store, and each reads what all have written."""
    stores: list[dist.Store] = []  # rank 0 serves the store as long as its object lives

    def join(rank: int) -> bytes:
        store = open_store(local_rank(rank, size), place, TIMEOUT_S)
        stores.append(store)
        store.set(f"value/{rank}", str(rank))
        if place.port:
            assert listening_addresses(place.port) == {"0100007F"}
        return b"".join(store.get(f"value/{other}") for other in range(size))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(join, range(size)))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def listening_addresses(port: int) -> set[str]:
    """Returns the local addresses, as the kernel writes them, at which a process listens on this port."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    local = [words[1].split(":") for words in lines if words[3] == "0A"]
    return {address for address, number in local if int(number, 16) == port}


def test_the_address_is_the_masters_if_it_is_set(private_tmp: Path) -> None:
    master = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    assert place_of(TORCHRUN) == StorePlace("node1", 29400, is_served=True)
    assert place_of({**OPEN_MPI, **master}) == StorePlace("node1", 29500)
    assert place_of({**SRUN, **master}) == StorePlace("node1", 29500)
    assert place_of({**SRUN, "MASTER_PORT": "29500"}) == StorePlace("gpu07", 29500)
    assert place_of(SRUN) == StorePlace("gpu07", 16384 + 62)


def test_on_one_machine_a_file_of_the_launch_has_the_port(private_tmp: Path) -> None:
    folder = private_tmp / f"meshwright-{os.geteuid()}"
    files = [place_of(variables).file for variables in (OPEN_MPI, {**OPEN_MPI, "PMIX_NAMESPACE": "other"}, MPICH)]
    assert len(set(files)) == 3
    assert {file.parent for file in files if file} == {folder}
    first_rank = {**MPICH, "PMI_RANK": "0", "MPI_LOCALRANKID": "0"}
    assert place_of(first_rank) == place_of(MPICH)
    folder.chmod(0o777)
    with pytest.raises(InputError, match="is not a private folder of this user"):
        place_of(MPICH)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MASTER_ADDR": "node1"}, "MASTER_ADDR=node1 is set, but MASTER_PORT is not"),
        ({"MASTER_PORT": "29500"}, "MASTER_PORT=29500 is set, but MASTER_ADDR is not"),
        ({"MASTER_ADDR": "node1", "MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        ({"MPI_LOCALNRANKS": "2", "PMI_SIZE": "4"}, "started 4 ranks, 2 of them on this machine"),
    ],
)
def test_an_address_that_is_missing_or_wrong_is_named(private_tmp: Path, changes: dict[str, str], message: str) -> None:
    with pytest.raises(InputError) as error:
        place_of({**MPICH, **changes})
    assert message in str(error.value)


def test_ranks_of_one_machine_meet_by_a_file_on_loopback(private_tmp: Path) -> None:
    # What a launch left whose rank 0 was killed: a port where nobody listens.
    file = private_tmp / "port"
    file.write_text(json.dumps({"port": free_port(), "token": "old"}))
    assert exchange(3, StorePlace(file=file)) == [b"012"] * 3
    assert not file.exists()


def test_rank_0_serves_at_the_masters_port_on_loopback_only(private_tmp: Path) -> None:
    # Ranks of one machine need no name of it.
    assert exchange(2, StorePlace("an-unknown-name", free_port())) == [b"01"] * 2


def test_a_port_that_is_in_use_and_ranks_that_are_missing_are_named(private_tmp: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(InputError, match=f"rank 0 cannot listen on port {port}: .*; set MASTER_PORT"):
            open_store(local_rank(0, 2), StorePlace("localhost", port), TIMEOUT_S)
    with pytest.raises(CollectiveError, match="for the 3 ranks of mpirun, and ranks 1 and 2 did not join"):
        open_store(local_rank(0, 3), StorePlace("localhost", free_port()), 0.2)
    file = private_tmp / "port"
    with pytest.raises(CollectiveError, match=r"rank 0 did not write its port to .*set MASTER_ADDR and MASTER_PORT"):
        open_store(local_rank(1, 2), StorePlace(file=file), 0.2)


def test_the_names_of_ranks() -> None:
    assert describe_ranks([3]) == "rank 3"
    assert describe_ranks([3, 5]) == "ranks 3 and 5"
    assert describe_ranks(range(20)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
