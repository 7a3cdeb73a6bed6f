"""Every builder makes an all-reduce for any number of ranks; a schedule that is none is caught; costs are as stated."""

from dataclasses import replace
from math import ceil, log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.collectives.schedules.builders import SCHEDULES, build
from meshwright.collectives.schedules.halving_doubling import halving_doubling
from meshwright.collectives.schedules.ring import ring
from meshwright.collectives.schedules.schedule import Schedule, Send
from meshwright.collectives.schedules.tree import double_tree, parent, tree
from meshwright.collectives.schedules.two_level import two_level
from tests.collectives.schedule_check import check, cost

MIB = 2**20
names = st.sampled_from(SCHEDULES)
tiers = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@pytest.mark.parametrize("ranks", [*range(1, 18), 31, 32, 33, 48, 63, 64])
def test_builders_make_all_reduces(ranks: int) -> None:
    for make in (ring, tree, double_tree, halving_doubling):
        check(make(ranks))
    for nodes in ([ranks], [1] * ranks, [ranks - ranks // 3, ranks // 3] if ranks >= 3 else [ranks]):
        check(two_level(nodes))


@given(nodes=tiers)
@settings(max_examples=40, deadline=None)
def test_two_levels_fit_any_nodes(nodes: list[int]) -> None:
    schedule = two_level(nodes)
    assert schedule.ranks == sum(nodes)
    check(schedule)


def broken(schedule: Schedule, place: int, how: str) -> Schedule:
    """With one of its sends left out, repeated, or changed into the other operation."""
    flat = [(number, send) for number, sends in enumerate(schedule.rounds) for send in sends]
    if how == "repeat":
        flat = [(number, send) for number, send in flat if send.operation == "add"]
    number, send = flat[place % len(flat)]
    rounds = list(schedule.rounds)
    others = tuple(other for other in rounds[number] if other is not send)
    if how == "leave out":
        rounds[number] = others
    elif how == "change":
        rounds[number] = (*others, replace(send, operation="add" if send.operation == "copy" else "copy"))
    else:
        rounds.insert(number, (send,))
    return Schedule(schedule.name, schedule.ranks, schedule.chunks, tuple(rounds))


@given(name=names, nodes=tiers, place=st.integers(0, 10**6), how=st.sampled_from(["leave out", "repeat", "change"]))
@settings(max_examples=60, deadline=None)
def test_one_wrong_send_is_caught(name: str, nodes: list[int], place: int, how: str) -> None:
    ranks = sum(nodes) + 1
    wrong = broken(build(name, ranks, [*nodes, 1]), place, how)
    with pytest.raises(ValueError, match=r"rank \d+ ends with a chunk \d+ that (lacks|has) the shares of ranks \[\d"):
        check(wrong)


def test_the_complaint_names_rank_chunk_and_shares() -> None:
    with pytest.raises(ValueError, match=r"rank 1 ends with a chunk 0 that lacks the shares of ranks \[0, 2\]"):
        check(Schedule("halfway", 3, 1, ((Send(1, 0, 0, "add"),), (Send(2, 0, 0, "add"),))))
    twice = ((Send(1, 0, 0, "add"),), (Send(0, 1, 0, "add"),))
    with pytest.raises(ValueError, match=r"rank 1 ends with a chunk 0 that has the shares of ranks \[1\] more than"):
        check(Schedule("echo", 2, 1, twice))


@pytest.mark.parametrize("ranks", [2, 4, 7, 16])
def test_a_ring_sends_the_least_to_the_next_rank(ranks: int) -> None:
    found = cost(ring(ranks), ranks * MIB, [0] * ranks)
    assert found.within_bytes == (2 * (ranks - 1) * MIB,) * ranks
    assert set(found.link_bytes) == {(rank, (rank + 1) % ranks) for rank in range(ranks)}
    assert found.rounds == found.longest_chain == 2 * (ranks - 1)


@pytest.mark.parametrize("ranks", range(2, 65))
def test_leaves_of_one_tree_are_inside_the_other(ranks: int) -> None:
    schedule = double_tree(ranks)
    inner = [
        {send.target for sends in schedule.rounds for send in sends if send.chunk == chunk and send.operation == "add"}
        for chunk in (0, 1)
    ]
    assert not inner[0] & inner[1]
    assert set(range(ranks)) - inner[0] - inner[1] == (set() if ranks % 2 == 0 else {0})
    sent = cost(schedule, 2 * MIB, [0] * ranks).within_bytes
    assert max(sent) <= 4 * MIB


@pytest.mark.parametrize("ranks", range(1, 65))
def test_trees_are_binary_and_low(ranks: int) -> None:
    above = [parent(rank, ranks) for rank in range(ranks)]
    assert above.count(None) == 1
    assert all(above.count(rank) <= 2 for rank in range(ranks))
    assert cost(tree(ranks), MIB, [0] * ranks).longest_chain == 2 * (ranks.bit_length() - 1)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 13, 64])
def test_halving_doubling_takes_few_rounds_and_bytes(ranks: int) -> None:
    power = 2 ** int(log2(ranks))
    found = cost(halving_doubling(ranks), power * MIB, [0] * ranks)
    folded = 0 if ranks == power else 2
    assert found.rounds == 2 * int(log2(ranks)) + folded == 2 * ceil(log2(ranks))
    halved = 2 * (power - 1) * MIB
    assert set(found.within_bytes) <= {halved, halved + power * MIB, power * MIB}
    assert max(found.within_bytes) == halved + (power * MIB if folded else 0)


def test_halving_doubling_sends_most_to_neighbors() -> None:
    links = cost(halving_doubling(8), 8 * MIB, [0] * 8).link_bytes
    assert [links[0, other] // MIB for other in (1, 2, 4)] == [8, 4, 2]


def test_two_levels_send_little_across() -> None:
    node_of = [0] * 4 + [1] * 4
    found = cost(two_level([4, 4]), 8 * MIB, node_of)
    assert found.across_bytes == (2 * MIB,) * 8
    assert found.within_bytes == (12 * MIB,) * 8
    one_ring = cost(ring(8), 8 * MIB, node_of)
    assert sum(found.across_bytes) == 16 * MIB < sum(one_ring.across_bytes) == 28 * MIB


def test_uneven_nodes_share_evenly() -> None:
    found = cost(two_level([3, 1, 2]), 18 * MIB, [0, 0, 0, 1, 2, 2])
    assert found.across_bytes == (8 * MIB, 8 * MIB, 8 * MIB, 24 * MIB, 12 * MIB, 12 * MIB)


def test_empty_chunks_cost_nothing() -> None:
    found = cost(ring(4), 1, [0] * 4)
    assert sum(found.link_bytes.values()) == 6
    assert cost(ring(4), 0, [0] * 4).longest_chain == 0
