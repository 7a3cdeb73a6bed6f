"""Predicted times of collectives obey bounds that hold on any machine, for the algorithm that a library chooses."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cluster.catalog import find_link
from meshwright.cluster.cluster import COLLECTIVES, Cluster, Collective, Curve, Device, Link, Node
from meshwright.cluster.names import cluster_from_name
from meshwright.errors import InputError
from meshwright.plan_fields.groups import Axes
from meshwright.simulator.communication.collectives import (
    COMMUNICATION_SLOWDOWN,
    COMPUTE_SLOWDOWN,
    LinkEfficiency,
    blend_s,
    collective_launch_s,
    collective_price,
    collective_s,
    link_efficiencies,
    overlap,
    sent_share,
)
from meshwright.simulator.communication.placement import RankGroup, group_of_axes

CLUSTERS = [
    *("8xH100", "8xA100-80GB", "8xV100-32GB", "4xV100-32GB", "8xB200", "8xV100-PCIe-16GB", "8xCore", "4x1xCore"),
    *("2x8xA100-80GB@EFA-50G", "4x8xA100-80GB", "16x8xH100", "3x4xL4", "8x8xH100@InfiniBand-NDR-SHARP", "32x1xH100"),
]


def whole(name: str) -> tuple[RankGroup, Cluster]:
    cluster = cluster_from_name(name)
    return group_of_axes(Axes(replicate=cluster.device_count), ("replicate",), cluster), cluster


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_time_rises_with_bytes_and_is_never_less_than_the_bandwidth_allows(name: str, kind: Collective) -> None:
    placed, cluster = whole(name)
    sizes = [4.0**power for power in range(18)]
    times = [collective_s(kind, size, placed, cluster) for size in sizes]
    assert all(sooner <= later for sooner, later in pairwise(times))
    assert times[0] > 0
    node = cluster.nodes[0].link.bandwidth_bytes_per_s
    out = cluster.link.bandwidth_bytes_per_s * placed.min_per_node if cluster.link and placed.nodes > 1 else node
    least = {"all_reduce": 0.5, "broadcast": 1.0, "point_to_point": 1.0 / placed.min_per_node}.get(
        kind, 0.25 / placed.min_per_node
    )
    if not any(link and link.curves for link in (cluster.link, cluster.nodes[0].link)):
        assert all(time >= least * size / max(node, out) for time, size in zip(times, sizes, strict=True))


@given(size=st.floats(1, 1e11), ranks=st.integers(2, 8))
@settings(max_examples=50)
def test_a_ring_takes_at_least_as_long_as_its_bandwidth_allows(size: float, ranks: int) -> None:
    cluster = cluster_from_name("8xA100-80GB")
    placed = group_of_axes(Axes(tensor=ranks), ("tensor",), cluster)
    wire = sent_share("all_reduce", ranks) * size
    assert (
        collective_s("all_reduce", size, placed, cluster, "ring") >= wire / cluster.nodes[0].link.bandwidth_bytes_per_s
    )


def test_the_bytes_that_a_ring_sends() -> None:
    assert sent_share("all_reduce", 4) == pytest.approx(2 * 3 / 4)
    assert sent_share("all_gather", 8) == sent_share("reduce_scatter", 8) == pytest.approx(7 / 8)
    assert sent_share("broadcast", 8) == 1


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_collective_of_one_rank_takes_no_time(kind: Collective) -> None:
    assert collective_s(kind, 1e9, RankGroup(ranks=1), cluster_from_name("8xH100")) == 0


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("size", [2**12, 2**20, 2**28])
def test_across_nodes_is_slower_than_within(kind: Collective, size: int) -> None:
    near, far = cluster_from_name("8xA100-80GB"), cluster_from_name("8x1xA100-80GB")
    tensor = group_of_axes(Axes(tensor=8), ("tensor",), near)
    spread = group_of_axes(Axes(tensor=8), ("tensor",), far)
    # Without curves, which hold the caller's time too, so that both are priced alike.
    bare = near.nodes[0].model_copy(update={"link": near.nodes[0].link.model_copy(update={"curves": {}})})
    within = collective_s(kind, size, tensor, near.model_copy(update={"nodes": (bare,)}))
    assert within < collective_s(kind, size, spread, far)


def test_small_messages_use_trees_and_large_ones_use_rings() -> None:
    placed, cluster = whole("16x8xA100-80GB")
    assert collective_price("all_reduce", 2**10, placed, cluster).algorithm == "tree"
    assert collective_price("all_reduce", 2**33, placed, cluster).algorithm == "ring"


def test_over_a_slow_network_two_levels_or_a_tree_beat_the_ring() -> None:
    placed, cluster = whole("2x8xA100-80GB@10G")
    times = {name: collective_s("all_reduce", 2**30, placed, cluster, name) for name in ("ring", "tree", "two_level")}
    assert min(times["tree"], times["two_level"]) < times["ring"]


def test_switches_that_reduce_are_used_where_they_are_faster() -> None:
    cluster = cluster_from_name("8xB200")
    node = cluster.nodes[0].model_copy(update={"link": cluster.nodes[0].link.model_copy(update={"curves": {}})})
    bare = cluster.model_copy(update={"nodes": (node,)})
    eight, two = (group_of_axes(Axes(tensor=ranks), ("tensor",), bare) for ranks in (8, 2))
    assert collective_price("all_reduce", 2**33, eight, bare).algorithm == "multicast"
    assert collective_price("all_reduce", 2**33, two, bare).algorithm == "ring"


def test_rails_do_not_slow_each_other() -> None:
    cluster = cluster_from_name("4x8xH100")
    rails = group_of_axes(Axes(replicate=4, tensor=8), ("replicate",), cluster)
    one_rail = group_of_axes(Axes(replicate=4), ("replicate",), cluster_from_name("4x1xH100"))
    assert rails.network_groups == 8
    assert collective_s("all_reduce", 2**28, rails, cluster) == collective_s("all_reduce", 2**28, one_rail, cluster)


def test_groups_on_one_host_bridge_share_it() -> None:
    cluster = cluster_from_name("8xV100-PCIe-16GB")
    one_group = group_of_axes(Axes(replicate=8), ("replicate",), cluster)
    four = group_of_axes(Axes(replicate=2, tensor=4), ("replicate",), cluster)
    assert four.bridge_groups == 4
    ratio = collective_s("all_gather", 2**30, four, cluster) / collective_s("all_gather", 2**30, one_group, cluster)
    assert ratio == pytest.approx(4 * (1 / 2) / (7 / 8), rel=0.05)


def test_a_measured_curve_is_preferred_and_named() -> None:
    link = find_link("NVLink3")
    size, seconds = link.curves["all_reduce"][0].points[3]
    cluster = cluster_from_name("8xA100-80GB")
    price = collective_price("all_reduce", size, group_of_axes(Axes(tensor=2), ("tensor",), cluster), cluster)
    assert (price.seconds, price.algorithm, price.based_on) == (seconds, "curve", "measured")
    group, unmeasured = whole("4x8xA100-80GB")
    assert collective_price("all_reduce", size, group, unmeasured).based_on == "fitted"


def loopback(*curves: Curve) -> Cluster:
    link = Link(name="Loopback", bandwidth_bytes_per_s=1e9, latency_s=1e-4, curves={"all_reduce": curves})
    device = Device(name="c", kind="cpu", memory_bytes=1, bandwidth_bytes_per_s=1, rates={"fp32": 1})
    return Cluster(name="local", nodes=(Node(device=device, count=8, link=link, cores=8),))


@pytest.mark.parametrize(
    ("cluster", "measured_s"), [("16x4xV100-32GB@OmniPath-100G", 1.162), ("4x8xA100-80GB@OmniPath-50G", 1.531)]
)
def test_omni_path_gives_nccl_a_tenth_of_its_ports(cluster: str, measured_s: float) -> None:
    """The times were measured on Jean Zay with rings of NCCL: 4 GB over four ports of 100 Gbit/s per node."""
    machines = cluster_from_name(cluster)
    everybody = group_of_axes(Axes(replicate=machines.device_count), ("replicate",), machines)
    ring_s = collective_s("all_reduce", 4_000_000_000, everybody, machines, "ring")
    assert ring_s == pytest.approx(measured_s, rel=0.2)


def test_the_time_of_cpu_ranks_is_a_multiple_of_that_measured_for_two() -> None:
    cluster = loopback(Curve(ranks=2, points=((1000, 2e-4), (1_000_000, 2e-3)), source="made up"))
    two, four = (group_of_axes(Axes(replicate=ranks), ("replicate",), cluster) for ranks in (2, 4))
    assert collective_s("all_reduce", 1_000_000, two, cluster) == pytest.approx(2e-3)
    assert collective_s("all_gather", 1_000_000, two, cluster) == pytest.approx(1e-3)
    assert collective_s("all_reduce", 2_000_000, four, cluster) == pytest.approx(6 * 1e-3)
    assert collective_s("point_to_point", 500_000, two, cluster) == pytest.approx(1e-3)


def test_an_algorithm_that_does_not_fit_is_refused() -> None:
    placed, cluster = whole("8xA100-80GB")
    with pytest.raises(InputError, match=r"all_reduce has no algorithm 'two_level' for 8 ranks.*choose ring"):
        collective_price("all_reduce", 1, placed, cluster, "two_level")


def test_an_unmeasured_link_is_refused() -> None:
    cluster = loopback()
    node = cluster.nodes[0].model_copy(update={"link": Link(name="?")})
    with pytest.raises(InputError, match="link '\\?' has no known bandwidth"):
        collective_s(
            "all_reduce", 1, RankGroup(2, per_node=2, min_per_node=2), cluster.model_copy(update={"nodes": (node,)})
        )


def test_every_share_has_a_source() -> None:
    for family in link_efficiencies().families.values():
        stated = {name for name in LinkEfficiency.model_fields if name in family.model_fields_set} - {
            "links",
            "sources",
            "mesh_devices",
        }
        assert stated == set(family.sources), family.links
    assert set(link_efficiencies().sources) == {"tree_share", "peer_s", "launch_s"}


def test_starting_a_collective_takes_the_host_of_a_gpu_some_time() -> None:
    assert collective_launch_s(cluster_from_name("8xH100")) > 0 == collective_launch_s(cluster_from_name("2xCore"))


def test_latency_and_transmission_are_blended() -> None:
    assert blend_s(1.0, 2.0, 1.0) == pytest.approx(3.0)
    assert blend_s(1.0, 1.0, 0.5) == pytest.approx(4.0)


@given(compute=st.floats(0, 10), communication=st.floats(0, 10))
def test_overlapped_work_takes_between_the_longer_part_and_the_slowed_sum(compute: float, communication: float) -> None:
    overlapped = overlap(compute, communication, "cuda")
    assert max(compute, communication) <= overlapped.total_s + 1e-9
    assert overlapped.total_s <= max(COMPUTE_SLOWDOWN, COMMUNICATION_SLOWDOWN) * (compute + communication) + 1e-9
    assert overlapped.exposed_s == pytest.approx(overlapped.total_s - compute)


def test_the_exposed_part_of_overlapped_communication() -> None:
    assert overlap(1.0, 0.0, "cuda").exposed_s == 0
    assert overlap(0.0, 1.0, "cuda").exposed_s == 1
    hidden = overlap(10.0, 1.0, "cuda").exposed_s
    assert 0 < hidden < 0.25
    assert overlap(10.0, 1.0, "cpu").exposed_s == pytest.approx(1.0)
