"""Ranks show each other the token of the run in a real store on the loopback address. A stranger who writes into it, or
comes as a rank, is refused and named, and the ranks meet all the same. Threads stand for ranks."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from meshwright.errors import CollectiveError, InputError
from meshwright.files.trust import sign
from meshwright.processes.agreement import agree
from meshwright.processes.loopback import connect_store, serve_store
from meshwright.processes.token import admission
from meshwright.processes.token.admission import enter
from meshwright.processes.token.signed_store import SignedStore, StrangerError
from tests.processes.token.stranger import put

TOKEN, OTHER = b"the token of the run", b"the token of another"
TIMEOUT_S = 30.0


class Stage:
    """A store, and connections of ranks and strangers to it."""

    def __init__(self) -> None:
        self.served, self.port = serve_store()

    def connect(self) -> dist.Store:
        return connect_store("127.0.0.1", self.port, timedelta(seconds=TIMEOUT_S))

    def join(self, rank: int, token: bytes = TOKEN, timeout_s: float = TIMEOUT_S) -> SignedStore:
        return enter(self.connect(), token, rank, 2, "mpirun", timeout_s)


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def check_that_they_agree(stores: list[SignedStore], threads: ThreadPoolExecutor) -> None:
    """Two ranks that have met compare their jobs."""
    jobs = [threads.submit(agree, {"seed": "0"}, rank, 2, store, "job", TIMEOUT_S) for rank, store in enumerate(stores)]
    for job in jobs:
        job.result(TIMEOUT_S)


def wait_for(store: dist.Store, name: str) -> bytes:
    store.wait([name], timedelta(seconds=TIMEOUT_S))
    return store.get(name)


def test_junk_in_the_store_and_on_its_port_is_refused_and_the_ranks_meet(
    stage: Stage, threads: ThreadPoolExecutor, capfd: pytest.CaptureFixture[str]
) -> None:
    for junk in (b"GET / HTTP/1.0\r\n\r\n", b"\0" * 1000, bytes(range(256)) * 300):
        with socket.create_connection(("127.0.0.1", stage.port)) as connection:
            connection.sendall(junk)
    stranger = stage.connect()
    first = threads.submit(stage.join, 0)
    for junk in (b"\xff\x00", b"[1, 2]", b"[" * 900, b'{"machine": "\\ud800\\n", "nonce": 7}', b"x" * 5000):
        put(stranger, "hello/1", junk)
        for number in (b"1", b"\xff", b"-1", b"1" * 50):
            stranger.queue_push("door", number)
    wait_for(stranger, "refused/1")
    second = threads.submit(stage.join, 1)
    check_that_they_agree([first.result(TIMEOUT_S), second.result(TIMEOUT_S)], threads)
    assert "refused: a process that is no rank came as rank 1 without the token of this run" in capfd.readouterr().err


def test_a_rank_with_another_token_is_refused_and_the_rank_itself_is_not(
    stage: Stage, threads: ThreadPoolExecutor, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_REFUSED_S", 0.0)
    first = threads.submit(stage.join, 0)
    with pytest.raises(InputError, match=r"rank 0 refused rank 1 on .*: set MESHWRIGHT_TOKEN to the same secret text"):
        stage.join(1, OTHER)
    second = threads.submit(stage.join, 1)
    check_that_they_agree([first.result(TIMEOUT_S), second.result(TIMEOUT_S)], threads)
    assert f"refused: {socket.gethostname()} came as rank 1 without the token" in capfd.readouterr().err


def test_rank_0_says_in_the_end_that_a_missing_rank_had_another_token(
    stage: Stage,
) -> None:
    stage.served.set("hello/1", json.dumps({"machine": "node7", "nonce": "1", "signature": "2"}))
    stage.served.queue_push("door", "1")
    with pytest.raises(CollectiveError, match="rank 1 did not join; rank 1 had another token: set MESHWRIGHT_TOKEN"):
        stage.join(0, timeout_s=0.3)


def test_what_an_earlier_launch_has_written_is_no_use_to_a_stranger(stage: Stage, threads: ThreadPoolExecutor) -> None:
    pair = [threads.submit(stage.join, rank) for rank in range(2)]
    earlier = [future.result(TIMEOUT_S) for future in pair]
    threads.submit(agree, {"seed": "1"}, 0, 1, earlier[0], "job", TIMEOUT_S).result()
    recorded = {key: stage.served.get(key) for key in stage.served.list_keys()}
    assert {"hello/1"} < recorded.keys()
    later = Stage()
    stranger = later.connect()
    for key, value in recorded.items():
        put(stranger, key, value)
    stranger.queue_push("door", "1")
    first = threads.submit(later.join, 0)
    answers = [key for key in recorded if key.startswith("welcome/")]
    # Rank 0 answers the old hello, which has a right signature, but does not take its rank for one that has arrived.
    while stranger.get(answers[0]) == recorded[answers[0]]:
        pass
    assert not first.done()
    second = threads.submit(later.join, 1)
    check_that_they_agree([first.result(TIMEOUT_S), second.result(TIMEOUT_S)], threads)


def test_a_stranger_cannot_play_rank_0(
    stage: Stage, threads: ThreadPoolExecutor, capfd: pytest.CaptureFixture[str]
) -> None:
    second = threads.submit(stage.join, 1)
    nonce = json.loads(wait_for(stage.served, "hello/1"))["nonce"]
    forged = {"session": "0" * 32, "signature": sign(OTHER, f"welcome\0001\0{nonce}\0{'0' * 32}".encode())}
    stage.connect().set(f"welcome/1/{nonce}", json.dumps(forged))
    while stage.served.check([f"welcome/1/{nonce}"]):
        pass
    first = threads.submit(stage.join, 0)
    stores = [first.result(TIMEOUT_S), second.result(TIMEOUT_S)]
    check_that_they_agree(stores, threads)
    assert "rank 1 refused an answer in the store that was not signed" in capfd.readouterr().err


def test_a_verdict_or_a_record_that_a_stranger_writes_is_refused(stage: Stage, threads: ThreadPoolExecutor) -> None:
    stores = [future.result(TIMEOUT_S) for future in [threads.submit(stage.join, rank) for rank in range(2)]]
    stores[0].write("job/1", json.dumps({"seed": "0"}))
    signed = stores[0].get("job/1").decode()
    stores[1].set("job/1", signed[:64] + json.dumps({"seed": "1"}))
    with pytest.raises(StrangerError, match="'job/1' in the store of the ranks was not written with the token"):
        agree({"seed": "0"}, 0, 2, stores[0], "job", TIMEOUT_S)
    # A signature counts for one name and one attempt only.
    stores[0].set("plan/1", signed)
    with pytest.raises(StrangerError):
        stores[1].read("plan/1")
    stores[0].part("attempt1").set("job/1", signed)
    with pytest.raises(StrangerError):
        stores[1].part("attempt1").read("job/1")
    assert stores[0].part("attempt1").get("job/1").decode() == signed
