"""Which links an axis crosses follows from the order of the ranks; nodes that differ count as the worst of them."""

import pytest

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.names import cluster_from_name
from meshwright.errors import InputError
from meshwright.plan_fields.groups import Axes
from meshwright.simulator.communication.placement import RankGroup, axis_groups, group_of_axes, neighbour_groups


def uneven(*counts: int) -> Cluster:
    base = cluster_from_name("2x8xA100-80GB")
    nodes = tuple(base.nodes[0].model_copy(update={"count": count, "number": 1}) for count in counts)
    return base.model_copy(update={"nodes": nodes})


def test_tensor_stays_in_a_node_and_every_replica_has_its_own_rail() -> None:
    placed = axis_groups(Axes(pipeline=4, replicate=32, tensor=8), cluster_from_name("128x8xA100-80GB"))
    assert (placed["tensor"].nodes, placed["tensor"].per_node, placed["tensor"].stride) == (1, 8, 1)
    assert placed["tensor"].tiers == ("within",)
    assert (placed["replicate"].nodes, placed["replicate"].per_node, placed["replicate"].stride) == (32, 1, 8)
    assert placed["replicate"].network_groups == 8
    assert placed["replicate"].tiers == ("between",)
    assert (placed["pipeline"].nodes, placed["pipeline"].stride) == (4, 256)


def test_an_axis_of_one_needs_no_link() -> None:
    placed = axis_groups(Axes(), cluster_from_name("8xH100"))
    assert set(placed.values()) == {RankGroup(ranks=1)}
    assert placed["tensor"].tiers == ()


def test_an_axis_may_cross_both_tiers() -> None:
    tensor = axis_groups(Axes(tensor=16), cluster_from_name("2x8xH100"))["tensor"]
    assert (tensor.ranks, tensor.nodes, tensor.per_node, tensor.min_per_node) == (16, 2, 8, 8)
    assert tensor.tiers == ("within", "between")
    assert tensor.network_groups == 1


def test_axes_can_communicate_as_one() -> None:
    both = group_of_axes(Axes(replicate=4, shard=4, tensor=2), ("shard", "replicate"), cluster_from_name("4x8xH100"))
    assert (both.ranks, both.nodes, both.per_node, both.stride, both.network_groups) == (16, 4, 4, 2, 2)


def test_neighbours_on_a_host_bridge_are_counted() -> None:
    placed = axis_groups(Axes(replicate=4, tensor=2), cluster_from_name("8xV100-PCIe-16GB"))
    assert placed["tensor"].bridge_groups == 0
    assert placed["replicate"].bridge_groups == 2


def test_uneven_nodes_count_as_the_worst_group() -> None:
    data = group_of_axes(Axes(replicate=12), ("replicate",), uneven(8, 4))
    assert (data.nodes, data.per_node, data.min_per_node) == (2, 8, 4)
    pairs = group_of_axes(Axes(replicate=4, tensor=2), ("tensor",), uneven(3, 5))
    assert (pairs.nodes, pairs.network_groups) == (2, 1)


def test_ranks_beyond_the_devices_are_refused() -> None:
    with pytest.raises(InputError, match=r"replicate\(4\) × tensor\(4\) = 16 ranks, but the cluster '8xH100' has 8"):
        axis_groups(Axes(replicate=4, tensor=4), cluster_from_name("8xH100"))


def test_a_large_cluster_is_placed() -> None:
    axes = Axes(pipeline=10, replicate=125, tensor=8)
    assert axis_groups(axes, cluster_from_name("1250x8xH100"))["replicate"].nodes == 125


def test_neighbours_of_a_pipeline_cross_the_bridge_of_a_node_or_the_network_only_where_they_must() -> None:
    near = neighbour_groups(Axes(pipeline=2, tensor=4), cluster_from_name("8xRTX3090"))
    assert [(pair.nodes, pair.bridge_groups) for pair in near] == [(1, 4), (1, 4)], "four pairs, one in each half"
    pairs = neighbour_groups(Axes(pipeline=4, replicate=2), cluster_from_name("2x4xV100-32GB"))
    assert [pair.nodes for pair in pairs] == [1, 2, 1, 2]
