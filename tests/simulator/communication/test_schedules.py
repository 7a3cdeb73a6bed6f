"""The predicted time of a schedule follows from its messages: it equals closed forms where there are some, and grows
with latency, bytes and work of the hosts."""

from dataclasses import replace

import pytest

from meshwright.cluster.catalog import find_link
from meshwright.cluster.cluster import Cluster, Device, Node
from meshwright.collectives.execute import SEGMENT_BYTES
from meshwright.collectives.schedules.builders import SCHEDULES, build
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.simulator.communication.collectives import collective_s
from meshwright.simulator.communication.combining import combine_s, cpu_network, fastest_algorithm, host_costs
from meshwright.simulator.communication.cpu_network import CpuNetwork, HostSpeed, LinkTier, SharedMemorySpeed, rate_at
from meshwright.simulator.communication.exchange import gradient_exchange
from meshwright.simulator.communication.placement import group_of_axes
from meshwright.simulator.communication.schedules import (
    algorithm_prices,
    cheapest_algorithm,
    native_s,
    schedule_s,
    shared_memory_s,
    two_level_memory_s,
)
from meshwright.simulator.runtime import OUR_RUNTIME

INFINITE = 1e30
MIB = 2**20
FREE = HostSpeed(
    cores=64,
    message_s=0.0,
    native_message_s=0.0,
    native_latency=1.0,
    byte_s=0.0,
    thread_s=0.0,
    call_s=0.0,
    add_bytes_per_s=INFINITE,
    copy_bytes_per_s=INFINITE,
)
WITHIN, ACROSS = LinkTier(1e-4, INFINITE, INFINITE), LinkTier(1e-3, INFINITE, INFINITE)
MEMORY = SharedMemorySpeed(1e-6, 2e-6, ((1, 1e9),), ((1, 2e9),), ((1, 4e9),))
LATENCY = CpuNetwork(WITHIN, ACROSS, FREE, MEMORY)  # nothing else takes time


def bandwidth(within: float, across: float) -> CpuNetwork:
    return CpuNetwork(LinkTier(0.0, INFINITE, within), LinkTier(0.0, INFINITE, across), FREE, MEMORY)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_each_round_takes_one_latency_and_the_first_one_takes_two(ranks: int) -> None:
    """Gloo sends when the receiver has posted a buffer. In the first round it waits for that; later buffers are posted
    ahead."""
    time_s = schedule_s(build("ring", ranks, [ranks]), 4096, LATENCY)
    rounds = 2 * (ranks - 1)
    assert time_s == pytest.approx((rounds + 1) * 1e-4, rel=0.35)  # receives are posted 8 ahead, not all of them
    if rounds <= 8:
        assert time_s == pytest.approx((rounds + 1) * 1e-4)


def test_halving_and_doubling_takes_fewer_rounds_than_a_ring() -> None:
    ring, halving = (schedule_s(build(name, 8, [8]), 4096, LATENCY) for name in ("ring", "halving_doubling"))
    assert halving == pytest.approx(7e-4)
    assert ring > 2 * halving


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_all_messages_of_a_node_share_its_bandwidth(ranks: int) -> None:
    """A ring of n sends 2 (n - 1) / n of the tensor from each rank."""
    time_s = schedule_s(build("ring", ranks, [ranks]), 64 * MIB, bandwidth(1e9, 1e9))
    assert time_s == pytest.approx(ranks * 2 * (ranks - 1) / ranks * 64 * MIB / 1e9, rel=0.01)


def test_the_link_between_nodes_is_shared_by_all_ranks_in_each_direction() -> None:
    """A two-level schedule sends the tensor once in each direction, whichever ranks of the nodes do it; a ring over all
    ranks sends more."""
    schedule = build("two_level", 4, [2, 2])
    time_s = schedule_s(schedule, 64 * MIB, bandwidth(INFINITE, 1e9), [2, 2])
    assert time_s == pytest.approx(64 * MIB / 1e9, rel=0.01)
    assert schedule_s(build("ring", 4, [4]), 64 * MIB, bandwidth(INFINITE, 1e9), [2, 2]) > 1.4 * time_s
    assert schedule_s(schedule, 64 * MIB, bandwidth(INFINITE, 1e9)) < 0.01 * time_s  # on one node nothing crosses


def test_an_idle_link_has_credit_for_the_first_bytes() -> None:
    """The credit is spent in the first round. Nothing arrives before it was sent."""
    ring, round_s = build("ring", 2, [1, 1]), 32 * MIB / 1e9
    plain = bandwidth(INFINITE, 1e9)
    shaped = replace(plain, across=LinkTier(0.0, INFINITE, 1e9, credit_s=round_s / 4))
    assert schedule_s(ring, 64 * MIB, plain, [1, 1]) == pytest.approx(2 * round_s, rel=1e-6)
    assert schedule_s(ring, 64 * MIB, shaped, [1, 1]) == pytest.approx(1.75 * round_s, rel=1e-6)
    assert schedule_s(ring, 4, shaped, [1, 1]) == pytest.approx(0.0, abs=1e-20)


def test_many_segments_overlap_the_work_of_links_and_hosts() -> None:
    """With one segment the ranks of a tree work one after the other; with many they work at the same time."""
    network = CpuNetwork(LinkTier(0.0, 1e9, INFINITE), None, FREE, None)
    tree = build("tree", 8, [8])
    sizes = (SEGMENT_BYTES, 16 * SEGMENT_BYTES)
    one_segment_s, many_segments_s = (schedule_s(tree, size, network) / size for size in sizes)
    assert many_segments_s < 0.6 * one_segment_s


@pytest.mark.parametrize("name", ["ring", "tree", "halving_doubling"])
def test_messages_additions_and_copies_take_time_of_the_hosts(name: str) -> None:
    schedule = build(name, 4, [4])
    busy = replace(LATENCY, host=replace(FREE, message_s=1e-3))
    adding = replace(LATENCY, host=replace(FREE, add_bytes_per_s=1e9))
    copying = replace(LATENCY, host=replace(FREE, byte_s=1e-9))
    least = schedule_s(schedule, MIB, LATENCY)
    assert schedule_s(schedule, MIB, busy) > least + 2e-3
    assert schedule_s(schedule, MIB, adding) > least + MIB / 1e9  # computing the mean reads all of it
    assert schedule_s(schedule, MIB, copying) > least


def test_ranks_that_share_cores_are_slower() -> None:
    busy = replace(LATENCY, host=replace(FREE, message_s=1e-3, cores=8))
    crowded = replace(LATENCY, host=replace(FREE, message_s=1e-3, cores=1))
    ring = build("ring", 8, [8])
    assert schedule_s(ring, 4096, crowded) > 5 * schedule_s(ring, 4096, busy)


def test_the_backend_runs_a_ring_of_segments() -> None:
    """A chunk has at least two segments, of at most 1 MiB."""
    per_message = replace(LATENCY, host=replace(FREE, native_message_s=1e-3), within=LinkTier(0.0, INFINITE, INFINITE))
    assert native_s(4096, 2, per_message) == pytest.approx(4e-3)  # a rank sends and receives 4
    assert native_s(64 * MIB, 2, per_message) == pytest.approx(64e-3, rel=0.05)
    quick = replace(LATENCY, host=replace(FREE, native_latency=0.5, call_s=1.0))
    assert native_s(4096, 2, quick) == pytest.approx(1.0 + 1.5e-4)


def test_shared_memory_synchronizes_and_moves_the_tensor() -> None:
    assert shared_memory_s(MIB, 2, LATENCY) == pytest.approx(2e-6 + MIB / 1e9)
    assert shared_memory_s(1024, 2, LATENCY) == pytest.approx(2e-6)  # it is copied: one synchronization less
    assert shared_memory_s(MIB, 1, LATENCY) == 0.0
    with pytest.raises(InputError, match="share memory"):
        shared_memory_s(MIB, 2, replace(LATENCY, memory=None))


def test_shared_memory_on_two_nodes_sends_a_slice_between_them() -> None:
    time_s = two_level_memory_s(MIB, [4, 4], bandwidth(INFINITE, 1e9))
    assert time_s == pytest.approx(4e-6 + MIB / 2e9 + MIB / 4e9 + MIB / 1e9, rel=0.01)


def test_rates_are_interpolated_between_measured_sizes() -> None:
    points = ((1024, 1e9), (4096, 4e9))
    assert rate_at(points, 10) == 1e9
    assert rate_at(points, 2048) == pytest.approx(2e9)
    assert rate_at(points, 10**9) == 4e9


def test_every_algorithm_has_a_price_and_the_cheapest_is_chosen() -> None:
    one_node, two_nodes = algorithm_prices(MIB, 4, [4], LATENCY), algorithm_prices(MIB, 4, [2, 2], LATENCY)
    assert set(one_node) == {"native", *SCHEDULES, "shared_memory"} - {"two_level"}
    assert set(two_nodes) == {"native", *SCHEDULES, "two_level_memory"}
    assert set(algorithm_prices(MIB, 3, [2, 1], replace(LATENCY, memory=None))) == {"native", *SCHEDULES}
    assert cheapest_algorithm(MIB, 4, [4], LATENCY) == min(
        ((name, s) for name, s in one_node.items()), key=lambda pair: pair[1]
    )
    with pytest.raises(InputError, match="but 4 combine"):
        cheapest_algorithm(MIB, 4, [2, 1], LATENCY)


def cluster(nodes: int, cores: int) -> Cluster:
    device = Device(
        name="core", kind="cpu", memory_bytes=2**32, bandwidth_bytes_per_s=1e10, rates={"fp32": 1e11}, sources={}
    )
    node = Node(device=device, count=cores, link=find_link("Loopback"), cores=cores, number=nodes)
    link = find_link("Ethernet-10G") if nodes > 1 else None
    return Cluster(name="cpus", nodes=(node,), link=link, based_on="measured")


def test_every_cost_of_a_host_has_its_source() -> None:
    costs = host_costs()
    assert set(costs.sources) == set(costs.model_dump()) - {"sources"}


def test_gradients_of_one_machine_are_priced_in_its_memory() -> None:
    machine = cluster(1, 4)
    plan = Plan(axes=Axes(replicate=4))
    replicas = group_of_axes(plan.axes, ("replicate",), machine)
    shared = combine_s(MIB, replicas, "auto", machine)
    assert shared == combine_s(MIB, replicas, "shared_memory", machine)
    assert shared == shared_memory_s(MIB, 4, cpu_network(machine, replicas))
    assert combine_s(MIB, replicas, "native", machine) == collective_s("all_reduce", MIB, replicas, machine) > shared
    exchange = gradient_exchange(MIB, 1, plan, machine, OUR_RUNTIME)
    assert exchange.replicate_s == pytest.approx(shared)


def test_ranks_that_share_a_core_wait_for_each_other() -> None:
    few, many = cluster(1, 4), cluster(1, 4).with_device_count(8)
    networks = [
        cpu_network(crowd, group_of_axes(Axes(replicate=crowd.device_count), ("replicate",), crowd))
        for crowd in (few, many)
    ]
    memories = [network.memory for network in networks]
    assert memories[0] is not None
    assert memories[1] is not None
    assert memories[1].sync_s == 2 * memories[0].sync_s


def test_plans_stay_auto_where_that_is_the_fastest() -> None:
    one_node, two_nodes = cluster(1, 4), cluster(2, 4)
    assert fastest_algorithm(25 * MIB, group_of_axes(Axes(replicate=4), ("replicate",), one_node), one_node) == "auto"
    assert fastest_algorithm(25 * MIB, group_of_axes(Axes(replicate=8), ("replicate",), two_nodes), two_nodes) == "auto"


def test_a_schedule_is_named_where_the_backend_is_slower() -> None:
    """With one rank per node and a high latency no memory is shared, and every round of a ring takes long."""
    near = cluster(16, 1)
    assert near.link is not None
    many = near.model_copy(update={"link": near.link.model_copy(update={"latency_s": 5e-3})})
    replicas = group_of_axes(Axes(replicate=16), ("replicate",), many)
    algorithm = fastest_algorithm(4096, replicas, many)
    assert algorithm in ("tree", "halving_doubling")
    assert combine_s(4096, replicas, algorithm, many) < combine_s(4096, replicas, "ring", many)


def test_groups_too_large_to_simulate_have_the_price_of_the_backend() -> None:
    large = cluster(32, 4)
    replicas = group_of_axes(Axes(replicate=128), ("replicate",), large)
    assert fastest_algorithm(MIB, replicas, large) == "auto"
    assert combine_s(MIB, replicas, "auto", large) == collective_s("all_reduce", MIB, replicas, large)
