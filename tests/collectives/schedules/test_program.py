"""The programs of the ranks do not deadlock, overlap segments, and overwrite no data that is still being sent."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.collectives.schedules.builders import SCHEDULES, build
from meshwright.collectives.schedules.program import RankProgram, build_program, rank_transfers
from meshwright.collectives.schedules.schedule import Schedule, Send
from meshwright.collectives.schedules.tree import tree


def programs(schedule: Schedule, size: int, segment: int) -> list[RankProgram]:
    return [build_program(schedule, rank_transfers(schedule, rank), size, segment) for rank in range(schedule.ranks)]


def run_together(rank_programs: list[RankProgram]) -> None:
    """Simulates the programs of all ranks. Fails where a receive has no matching send or the ranks deadlock."""
    in_flight: dict[tuple[int, int, int], tuple[int, int]] = {}

    def send(rank: int, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            message = rank_programs[rank].sends[number]
            key = (rank, message.transfer.peer, message.number)
            assert key not in in_flight, "two messages have the same tag"
            assert message.begin < message.end, "an empty message is sent"
            in_flight[key] = (message.begin, message.end)

    for rank, program in enumerate(rank_programs):
        send(rank, program.first)
    next_step = [0] * len(rank_programs)
    progressed = True
    while progressed:
        progressed = False
        for rank, program in enumerate(rank_programs):
            while next_step[rank] < len(program.steps):
                step = program.steps[next_step[rank]]
                key = (step.receive.transfer.peer, rank, step.receive.number)
                if key not in in_flight:
                    break
                assert in_flight.pop(key) == (step.receive.begin, step.receive.end)
                send(rank, step.then)
                next_step[rank] += 1
                progressed = True
    assert next_step == [len(program.steps) for program in rank_programs], "ranks wait for each other"
    assert not in_flight


@given(
    name=st.sampled_from(SCHEDULES),
    nodes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    size=st.integers(0, 300),
    segment=st.integers(1, 64),
)
@settings(max_examples=60)
def test_ranks_do_not_deadlock(name: str, nodes: list[int], size: int, segment: int) -> None:
    rank_programs = programs(build(name, sum(nodes), nodes), size, segment)
    run_together(rank_programs)
    assert all(message.end - message.begin <= segment for program in rank_programs for message in program.sends)


@pytest.mark.parametrize("name", SCHEDULES)
def test_copies_of_all_schedules_are_received_in_place(name: str) -> None:
    schedule = build(name, 7, [4, 3])
    for rank in range(7):
        _, incoming = rank_transfers(schedule, rank)
        assert all(receive.in_place == (receive.operation == "copy") and not receive.unsafe for receive in incoming)


def test_a_receive_waits_for_a_send_that_it_might_overwrite() -> None:
    """The message of rank 2 to rank 0 does not depend on that of rank 0 to rank 1, unless rank 1 has sent to rank 2
    before."""
    first = (Send(0, 1, 0, "copy"),)
    between = (Send(1, 2, 0, "add"),)
    last = (Send(2, 0, 0, "copy"),)
    for rounds, unsafe in (((first, last), {(0, 1)}), ((first, between, last), set())):
        _, (receive,) = rank_transfers(Schedule("odd", 3, 1, rounds), 0)
        assert (receive.in_place, receive.unsafe) == (not unsafe, unsafe)
        (step,) = programs(Schedule("odd", 3, 1, rounds), 8, 8)[0].steps
        assert step.after == ((0,) if unsafe else ())


def test_a_chunk_that_was_received_and_not_sent_since_is_not_received_in_place() -> None:
    rounds = ((Send(1, 0, 0, "add"),), (Send(2, 0, 0, "copy"),))
    _, (_, second) = rank_transfers(Schedule("odd", 3, 1, rounds), 0)
    assert not second.in_place


def test_segments_are_forwarded_while_later_ones_are_in_flight() -> None:
    """An inner rank sends its first segment to its parent before it has received the later ones of both children."""
    inner = programs(tree(4), 40, 10)[1]
    sends = list(chain.from_iterable(step.then for step in inner.steps))
    sends_to_parent = [
        n for n in sends if inner.sends[n].transfer.peer == 3 and inner.sends[n].transfer.operation == "add"
    ]
    assert [inner.sends[n].begin for n in sends_to_parent] == [0, 10, 20, 30]
    before_first = next(index for index, step in enumerate(inner.steps) if sends_to_parent[0] in step.then)
    pending_segments = {(step.receive.transfer.peer, step.receive.begin) for step in inner.steps[before_first + 1 :]}
    assert pending_segments >= {(0, 20), (0, 30), (2, 10), (2, 20), (2, 30)}


def test_neighboring_chunks_are_one_message() -> None:
    program = programs(build("halving_doubling", 8, [8]), 800, 10**6)[0]
    assert sorted(message.end - message.begin for message in program.sends) == [100, 100, 200, 200, 400, 400]
