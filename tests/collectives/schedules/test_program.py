"""What each rank is told to do: nobody waits forever, segments overlap, nothing is overwritten that still travels."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.collectives.schedules.builders import SCHEDULES, build
from meshwright.collectives.schedules.program import Program, program, transfers
from meshwright.collectives.schedules.schedule import Schedule, Send
from meshwright.collectives.schedules.tree import tree


def programs(schedule: Schedule, size: int, segment: int) -> list[Program]:
    return [program(schedule, transfers(schedule, rank), size, segment) for rank in range(schedule.ranks)]


def played(found: list[Program]) -> None:
    """Plays programs of all ranks against each other; a receive that nobody sends, or too late, stops it."""
    under_way: dict[tuple[int, int, int], tuple[int, int]] = {}

    def send(rank: int, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            message = found[rank].sends[number]
            key = (rank, message.transfer.peer, message.number)
            assert key not in under_way, "two messages have one tag"
            under_way[key] = (message.begin, message.end)

    for rank, one in enumerate(found):
        send(rank, one.first)
    at = [0] * len(found)
    moved = True
    while moved:
        moved = False
        for rank, one in enumerate(found):
            while at[rank] < len(one.steps):
                step = one.steps[at[rank]]
                key = (step.receive.transfer.peer, rank, step.receive.number)
                if key not in under_way:
                    break
                assert under_way.pop(key) == (step.receive.begin, step.receive.end)
                send(rank, step.then)
                at[rank] += 1
                moved = True
    assert at == [len(one.steps) for one in found], "ranks wait for each other"
    assert not under_way


@given(
    name=st.sampled_from(SCHEDULES),
    nodes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    size=st.integers(0, 300),
    segment=st.integers(1, 64),
)
@settings(max_examples=60, deadline=None)
def test_nobody_waits_forever(name: str, nodes: list[int], size: int, segment: int) -> None:
    found = programs(build(name, sum(nodes), nodes), size, segment)
    played(found)
    assert all(message.end - message.begin <= segment for one in found for message in one.sends)


@pytest.mark.parametrize("name", SCHEDULES)
def test_copies_of_our_schedules_arrive_in_place(name: str) -> None:
    schedule = build(name, 7, [4, 3])
    for rank in range(7):
        _, incoming = transfers(schedule, rank)
        assert all(one.in_place == (one.operation == "copy") and not one.unsafe for one in incoming)


def test_what_may_still_travel_is_waited_for() -> None:
    """Rank 2 knows nothing of what rank 0 sent rank 1; once rank 1 tells it, it does."""
    give = (Send(0, 1, 0, "copy"),)
    tell = (Send(1, 2, 0, "add"),)
    take = (Send(2, 0, 0, "copy"),)
    for rounds, unsafe in (((give, take), {(0, 1)}), ((give, tell, take), set())):
        _, (receive,) = transfers(Schedule("odd", 3, 1, rounds), 0)
        assert (receive.in_place, receive.unsafe) == (not unsafe, unsafe)
        (step,) = programs(Schedule("odd", 3, 1, rounds), 8, 8)[0].steps
        assert step.after == ((0,) if unsafe else ())


def test_what_was_received_and_not_sent_since_is_not_overwritten_early() -> None:
    rounds = ((Send(1, 0, 0, "add"),), (Send(2, 0, 0, "copy"),))
    _, (_, second) = transfers(Schedule("odd", 3, 1, rounds), 0)
    assert not second.in_place


def test_segments_go_on_while_others_travel() -> None:
    """An inner rank sends its first segment up while it still awaits later ones of both children."""
    inner = programs(tree(4), 40, 10)[1]
    sent = list(chain.from_iterable(step.then for step in inner.steps))
    up = [n for n in sent if inner.sends[n].transfer.peer == 3 and inner.sends[n].transfer.operation == "add"]
    assert [inner.sends[n].begin for n in up] == [0, 10, 20, 30]
    before_first = next(place for place, step in enumerate(inner.steps) if up[0] in step.then)
    awaited = {(step.receive.transfer.peer, step.receive.begin) for step in inner.steps[before_first + 1 :]}
    assert awaited >= {(0, 20), (0, 30), (2, 10), (2, 20), (2, 30)}


def test_neighboring_chunks_travel_as_one_message() -> None:
    one = programs(build("halving_doubling", 8, [8]), 800, 10**6)[0]
    assert sorted(message.end - message.begin for message in one.sends) == [100, 100, 200, 200, 400, 400]
