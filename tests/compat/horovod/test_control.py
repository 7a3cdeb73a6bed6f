"""Strangers who connect to what ranks of Horovod listen on are refused and named, and the ranks meet all the same."""

import json
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from meshwright.compat.horovod.engine.control import connect
from meshwright.compat.horovod.engine.frames import FrameReader, send_frame
from meshwright.compat.horovod.engine.rendezvous import Placement
from meshwright.processes.token.signed_store import SignedStore, read

TIMEOUT_S = 60.0


@pytest.mark.parametrize("has_token", [True, False])
def test_strangers_are_refused_and_ranks_meet(has_token: bool, capfd: pytest.CaptureFixture[str]) -> None:
    shared = dist.HashStore()
    stores = [SignedStore(shared, b"key") if has_token else shared for _ in range(2)]

    def join(rank: int) -> list[int]:
        links = connect(Placement(rank, 2, rank, 2, 0, 1, stores[rank]), TIMEOUT_S, lambda: None)
        with_rank_1 = list(links.connections)
        links.close()
        return with_rank_1

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(join, 0)
        stores[0].wait(["control"])
        address, port, token = read(stores[0], "control").decode().rsplit(":", 2)
        assert bool(token) is not has_token, "a token of the run is not written to the store"
        strangers = [
            json.dumps(text).encode() for text in (["", 1], ["x", 1], 7, {"a": 1}, [token or "x", 0], ["é", 1])
        ]
        for message in (*strangers, b"xx", b"[" * 900):
            with socket.create_connection((address, int(port))) as connection:
                connection.sendall(struct.pack("!I", len(message)) + message)
        with socket.create_connection((address, int(port))) as connection:
            connection.sendall(b"GET / HTTP/1.0")  # a length of a gigabyte
        assert threads.submit(join, 1).result(TIMEOUT_S) == [0]
        assert first.result(TIMEOUT_S) == [1]
    line = "refused: a process on 127.0.0.1 connected to rank 0 without the token of this run"
    assert capfd.readouterr().err.splitlines() == [line] * 9


def test_messages_that_are_none_end_a_connection_and_not_the_reader() -> None:
    for junk in (b"\0\0\0\2xx", b"GET / HTTP/1.0\r\n\r\n"):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(junk)
            assert FrameReader(ours, 1000).available() is None
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = FrameReader(ours)
        theirs.sendall(b"\0\0")
        assert reader.available() == []
        theirs.sendall(b"\0\2{}")
        assert reader.available() == [{}]
        send_frame(theirs, {"worker": "a"})
        assert reader.one() == {"worker": "a"}
