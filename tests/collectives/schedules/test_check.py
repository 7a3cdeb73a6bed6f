"""Every builder makes an all-reduce for any number of ranks; a wrong schedule is caught; costs are as documented."""

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
from tests.collectives.schedule_check import check_all_reduce, schedule_cost

MIB = 2**20
schedule_names = st.sampled_from(SCHEDULES)
ranks_per_node = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@pytest.mark.parametrize("ranks", [*range(1, 18), 31, 32, 33, 48, 63, 64])
def test_builders_make_all_reduces(ranks: int) -> None:
    for make in (ring, tree, double_tree, halving_doubling):
        check_all_reduce(make(ranks))
    for nodes in ([ranks], [1] * ranks, [ranks - ranks // 3, ranks // 3] if ranks >= 3 else [ranks]):
        check_all_reduce(two_level(nodes))


@given(nodes=ranks_per_node)
@settings(max_examples=40)
def test_two_levels_fit_any_nodes(nodes: list[int]) -> None:
    schedule = two_level(nodes)
    assert schedule.ranks == sum(nodes)
    check_all_reduce(schedule)


def with_wrong_send(schedule: Schedule, index: int, fault: str) -> Schedule:
    """Returns the schedule with one send left out, repeated, or changed into the other operation."""
    all_sends = [(number, send) for number, sends in enumerate(schedule.rounds) for send in sends]
    if fault == "repeat":
        all_sends = [(number, send) for number, send in all_sends if send.operation == "add"]
    number, send = all_sends[index % len(all_sends)]
    rounds = list(schedule.rounds)
    other_sends = tuple(other for other in rounds[number] if other is not send)
    if fault == "leave out":
        rounds[number] = other_sends
    elif fault == "change":
        rounds[number] = (*other_sends, replace(send, operation="add" if send.operation == "copy" else "copy"))
    else:
        rounds.insert(number, (send,))
    return Schedule(schedule.name, schedule.ranks, schedule.chunks, tuple(rounds))


@given(
    name=schedule_names,
    nodes=ranks_per_node,
    index=st.integers(0, 10**6),
    fault=st.sampled_from(["leave out", "repeat", "change"]),
)
@settings(max_examples=60)
def test_one_wrong_send_is_caught(name: str, nodes: list[int], index: int, fault: str) -> None:
    ranks = sum(nodes) + 1
    wrong = with_wrong_send(build(name, ranks, [*nodes, 1]), index, fault)
    with pytest.raises(ValueError, match=r"rank \d+ ends with a chunk \d+ that (lacks|has) the shares of ranks \[\d"):
        check_all_reduce(wrong)


def test_the_message_names_rank_and_chunk() -> None:
    with pytest.raises(ValueError, match=r"rank 1 ends with a chunk 0 that lacks the shares of ranks \[0, 2\]"):
        check_all_reduce(Schedule("halfway", 3, 1, ((Send(1, 0, 0, "add"),), (Send(2, 0, 0, "add"),))))
    repeated = ((Send(1, 0, 0, "add"),), (Send(0, 1, 0, "add"),))
    with pytest.raises(ValueError, match=r"rank 1 ends with a chunk 0 that has the shares of ranks \[1\] more than"):
        check_all_reduce(Schedule("echo", 2, 1, repeated))


@pytest.mark.parametrize("ranks", [2, 4, 7, 16])
def test_a_ring_sends_the_least_to_the_next_rank(ranks: int) -> None:
    costs = schedule_cost(ring(ranks), ranks * MIB, [0] * ranks)
    assert costs.within_bytes == (2 * (ranks - 1) * MIB,) * ranks
    assert set(costs.link_bytes) == {(rank, (rank + 1) % ranks) for rank in range(ranks)}
    assert costs.rounds == costs.longest_chain == 2 * (ranks - 1)


@pytest.mark.parametrize("ranks", range(2, 65))
def test_leaves_of_one_tree_are_inner_ranks_of_the_other(ranks: int) -> None:
    schedule = double_tree(ranks)
    inner = [
        {send.target for sends in schedule.rounds for send in sends if send.chunk == chunk and send.operation == "add"}
        for chunk in (0, 1)
    ]
    assert not inner[0] & inner[1]
    assert set(range(ranks)) - inner[0] - inner[1] == (set() if ranks % 2 == 0 else {0})
    sent_bytes = schedule_cost(schedule, 2 * MIB, [0] * ranks).within_bytes
    assert max(sent_bytes) <= 4 * MIB


@pytest.mark.parametrize("ranks", range(1, 65))
def test_trees_are_binary_and_of_logarithmic_depth(ranks: int) -> None:
    parents = [parent(rank, ranks) for rank in range(ranks)]
    assert parents.count(None) == 1
    assert all(parents.count(rank) <= 2 for rank in range(ranks))
    assert schedule_cost(tree(ranks), MIB, [0] * ranks).longest_chain == 2 * (ranks.bit_length() - 1)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 13, 64])
def test_halving_doubling_takes_few_rounds_and_bytes(ranks: int) -> None:
    power = 2 ** int(log2(ranks))
    costs = schedule_cost(halving_doubling(ranks), power * MIB, [0] * ranks)
    folding_rounds = 0 if ranks == power else 2
    assert costs.rounds == 2 * int(log2(ranks)) + folding_rounds == 2 * ceil(log2(ranks))
    halving_bytes = 2 * (power - 1) * MIB
    assert set(costs.within_bytes) <= {halving_bytes, halving_bytes + power * MIB, power * MIB}
    assert max(costs.within_bytes) == halving_bytes + (power * MIB if folding_rounds else 0)


def test_halving_doubling_sends_most_to_neighbors() -> None:
    links = schedule_cost(halving_doubling(8), 8 * MIB, [0] * 8).link_bytes
    assert [links[0, other] // MIB for other in (1, 2, 4)] == [8, 4, 2]


def test_two_levels_send_few_bytes_across_nodes() -> None:
    node_of = [0] * 4 + [1] * 4
    costs = schedule_cost(two_level([4, 4]), 8 * MIB, node_of)
    assert costs.across_bytes == (2 * MIB,) * 8
    assert costs.within_bytes == (12 * MIB,) * 8
    one_ring = schedule_cost(ring(8), 8 * MIB, node_of)
    assert sum(costs.across_bytes) == 16 * MIB < sum(one_ring.across_bytes) == 28 * MIB


def test_the_ranks_of_uneven_nodes_have_even_shares() -> None:
    costs = schedule_cost(two_level([3, 1, 2]), 18 * MIB, [0, 0, 0, 1, 2, 2])
    assert costs.across_bytes == (8 * MIB, 8 * MIB, 8 * MIB, 24 * MIB, 12 * MIB, 12 * MIB)


def test_empty_chunks_cost_nothing() -> None:
    costs = schedule_cost(ring(4), 1, [0] * 4)
    assert sum(costs.link_bytes.values()) == 6
    assert schedule_cost(ring(4), 0, [0] * 4).longest_chain == 0
