"""Times interpolated from curves pass through the measured points, rise with the size, and are None outside of them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cluster.catalog import find_link, links_between, links_within
from meshwright.cluster.cluster import Curve, Link
from meshwright.cluster.curves import curve_time, rising, smallest_measured_bytes

WITH_CURVES = [
    *(name for name in links_within() if find_link(name).curves),
    *("EFA-50G", "EFA-400G", "EFAv4-400G", "Ethernet-40G", "InfiniBand-NDR-SHARP"),
]


def link(*curves: Curve) -> Link:
    return Link(name="a", bandwidth_bytes_per_s=1e9, latency_s=1e-5, curves={"all_reduce": curves})


def curve(ranks: int, nodes: int = 1, slower: float = 1.0) -> Curve:
    points = ((1000, 2e-5 * slower), (10_000, 4e-5 * slower), (1_000_000, 1e-3 * slower))
    return Curve(ranks=ranks, nodes=nodes, points=points, source="invented")


@pytest.mark.parametrize("name", WITH_CURVES)
def test_the_catalogs_curves_go_through_their_points_and_rise(name: str) -> None:
    named = find_link(name)
    for collective, curves in named.curves.items():
        for measured in curves:
            ranks, nodes = measured.ranks, measured.nodes
            for size, seconds in measured.points:
                assert curve_time(named, collective, size, ranks, nodes) == pytest.approx(seconds)
            times = [curve_time(named, collective, 1.3**power, ranks, nodes) or 0 for power in range(100)]
            assert times == sorted(times)
            assert times[0] > 0


def test_the_catalog_has_curves_for_the_links_that_were_measured() -> None:
    assert {"NVLink2", "NVLink3", "NVLink4", "NVLink5"} <= set(WITH_CURVES)
    assert set(find_link("NVLink4").curves) == {"all_reduce", "all_gather", "reduce_scatter"}
    assert not find_link("PCIe4-x16").curves
    assert "Ethernet-40G" in links_between()


@given(st.lists(st.floats(1, 1e10), min_size=2, max_size=20))
def test_a_larger_message_never_takes_less_time(sizes: list[float]) -> None:
    times = [curve_time(link(curve(2), curve(8, slower=3)), "all_reduce", size, 5) or 0 for size in sorted(sizes)]
    assert all(earlier <= later * (1 + 1e-12) for earlier, later in pairwise(times))


def test_outside_the_points_latency_and_bandwidth_decide() -> None:
    assert curve_time(link(curve(2)), "all_reduce", 1e-9, 2) == pytest.approx(1e-5)
    assert curve_time(link(curve(2)), "all_reduce", 5e6, 2) == pytest.approx(5e-3)


def test_ranks_are_interpolated_and_not_extrapolated() -> None:
    two_and_eight = link(curve(2), curve(8, slower=4))
    assert curve_time(two_and_eight, "all_reduce", 1000, 4) == pytest.approx(4e-5)
    assert curve_time(two_and_eight, "all_reduce", 1000, 16) is None
    assert curve_time(two_and_eight, "all_gather", 1000, 4) is None


def test_the_smallest_measured_size_is_that_of_both_curves() -> None:
    eight = Curve(ranks=8, points=((4000, 1e-4), (8000, 2e-4)), source="invented")
    assert smallest_measured_bytes(link(curve(2)), "all_reduce", 2) == 1000
    assert smallest_measured_bytes(link(curve(2), eight), "all_reduce", 4) == 4000
    assert smallest_measured_bytes(link(curve(2)), "all_gather", 2) is None


def test_over_nodes_only_curves_with_the_same_ranks_per_node_are_used() -> None:
    two_and_eight_nodes = link(curve(16, nodes=2), curve(64, nodes=8, slower=2))
    assert curve_time(two_and_eight_nodes, "all_reduce", 1000, 32, nodes=4) == pytest.approx(2e-5 * 2**0.5)
    assert curve_time(two_and_eight_nodes, "all_reduce", 1000, 16, nodes=16) is None
    assert curve_time(two_and_eight_nodes, "all_reduce", 1000, 16) is None


def test_measured_points_are_made_to_rise() -> None:
    assert rising([(4, 3.0), (1, 5.0), (2, 2.0)]) == ((1, 2.0), (2, 2.0), (4, 3.0))


def test_a_curve_that_falls_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(10, 0.002\) comes before \(20, 0.001\)"):
        Curve(ranks=2, points=((10, 2e-3), (20, 1e-3)), source="invented")
    with pytest.raises(ValueError, match="two all_reduce curves for 2 ranks"):
        link(curve(2), curve(2))
