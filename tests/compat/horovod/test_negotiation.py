"""Rank 0 decides which operations run, in which groups and order, and finds mismatches."""

from typing import Any

from meshwright.compat.horovod.engine import requests
from meshwright.compat.horovod.engine.negotiation import Negotiation
from meshwright.compat.horovod.engine.requests import ReduceOp, Request


def request(name: str, kind: str = requests.ALLREDUCE, rows: int = 4, **fields: Any) -> Request:
    return Request(kind, name, **{"dtypes": ("float32",), "shapes": ((rows, 2),), **fields})


def groups(frames: dict[int, dict[str, Any]], rank: int) -> list[list[int]]:
    return [entry["ids"] for entry in frames.get(rank, {}).get("groups", ())]


def errors(frames: dict[int, dict[str, Any]]) -> dict[int, list[str]]:
    return {rank: [text for _, text, _ in frame["errors"]] for rank, frame in frames.items() if "errors" in frame}


def test_an_operation_runs_when_every_rank_has_asked_for_it() -> None:
    negotiation = Negotiation(2, 2**20)
    negotiation.submit(0, 7, request("a"))
    assert negotiation.take() == {}
    assert negotiation.stalled() == [(request("a"), [1])]
    negotiation.submit(1, 3, request("a"))
    frames = negotiation.take()
    assert groups(frames, 0) == [[7]]
    assert groups(frames, 1) == [[3]]
    assert negotiation.take() == {}


def test_reductions_of_one_type_are_fused_in_the_same_order_on_all_ranks() -> None:
    negotiation = Negotiation(2, 3 * 32)  # three tensors of 32 bytes
    names = "abcde"
    for number, name in enumerate(names):
        negotiation.submit(0, number, request(name))
    negotiation.submit(0, 8, request("g", kind=requests.ALLGATHER))
    negotiation.submit(0, 9, request("h", dtypes=("float64",)))
    negotiation.submit(1, 8, request("g", kind=requests.ALLGATHER))
    negotiation.submit(1, 9, request("h", dtypes=("float64",)))
    for number, name in reversed(list(enumerate(names))):
        negotiation.submit(1, number + 20, request(name))
    frames = negotiation.take()
    assert groups(frames, 0) == [[8], [9], [4, 3, 2], [1, 0]]
    assert groups(frames, 1) == [[8], [9], [24, 23, 22], [21, 20]]


def test_mismatches_are_errors_of_every_rank_with_both_sides() -> None:
    cases = [
        (request("x"), request("x", rows=5), "rank 0 called it with (4, 2), rank 1 with (5, 2)"),
        (request("x"), request("x", dtypes=("int64",)), "rank 0 called it with float32, rank 1 with int64"),
        (request("x"), request("x", op=ReduceOp.MAX), "rank 0 called it with Sum, rank 1 with Max"),
        (request("x"), request("x", prescale=2.0), "rank 0 called it with 1.0, rank 1 with 2.0"),
        (request("x"), request("x", device="cuda"), "rank 0 called it with cpu, rank 1 with cuda"),
        (request("x", kind="broadcast"), request("x", kind="broadcast", root=1), "root ranks"),
    ]
    for one, other, text in cases:
        negotiation = Negotiation(2, 2**20)
        negotiation.submit(0, 1, one)
        negotiation.submit(1, 1, other)
        found = errors(negotiation.take())
        assert found[0] == found[1]
        assert text in found[0][0]


def test_ranks_that_wait_for_different_operations_of_one_name_fail() -> None:
    negotiation = Negotiation(2, 2**20)
    one, other = request("x"), request("x", kind=requests.ALLGATHER)
    negotiation.submit(0, 1, one)
    negotiation.submit(1, 2, other)
    negotiation.block(0, one.key)
    assert negotiation.take() == {}, "rank 1 may still call the other operation"
    negotiation.block(1, other.key)
    found = errors(negotiation.take())
    assert found[0] == found[1]
    assert "rank 0 called allreduce, rank 1 allgather" in found[0][0]


def test_ranks_that_have_joined_contribute_zeros_to_reductions_only() -> None:
    negotiation = Negotiation(3, 2**20)
    for rank in (0, 1):
        negotiation.submit(rank, 1, request("x"))
    negotiation.submit(2, 5, Request(requests.JOIN, "join"))
    frames = negotiation.take()
    assert groups(frames, 0) == groups(frames, 1) == [[1]]
    assert [Request.from_plain(plain) for plain in frames[2]["groups"][0]["zeros"]] == [request("x")]
    for rank in (0, 1):
        negotiation.submit(rank, 2, request("y", kind=requests.ALLGATHER))
    assert "[2] have joined" in errors(negotiation.take())[1][0]
    negotiation.submit(1, 6, Request(requests.JOIN, "join"))
    negotiation.submit(0, 7, Request(requests.JOIN, "join"))
    last = negotiation.take()
    assert [groups(last, rank) for rank in range(3)] == [[[7]], [[6]], [[5]]]
    assert last[1]["groups"][0]["details"] == [0], "rank 0 was the last"


def test_operations_that_need_a_rank_that_has_left_fail() -> None:
    negotiation = Negotiation(2, 2**20)
    negotiation.submit(0, 1, request("x"))
    negotiation.leave(1)
    assert "rank 1 has shut down" in errors(negotiation.take())[0][0]
    negotiation.submit(0, 2, request("y"))
    assert "rank 1 has shut down" in errors(negotiation.take())[0][0]


def test_requests_survive_their_way_over_a_connection() -> None:
    sent = request("x", kind=requests.ALLTOALL, splits=(1, 3), root=1, prescale=0.5, ranks=(0, 2))
    assert Request.from_plain(sent.to_plain()) == sent
