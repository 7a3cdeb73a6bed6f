"""Machines that were measured as a cluster: in the order of their ranks, and slower ones as another kind."""

from meshwright.calibrate.machines import COLLECTIVES, _cluster
from meshwright.cluster.cluster import Node
from meshwright.cluster.detect import find_cluster


def machine(name: str, speed: float = 1.0) -> Node:
    (node,) = find_cluster(f"4x{name}").nodes
    rates = {dtype: speed * rate for dtype, rate in node.device.rates.items()}
    return node.model_copy(update={"device": node.device.model_copy(update={"rates": rates})})


def numbers(*nodes: Node) -> list[tuple[str, int]]:
    points = {collective: [(1024, 1e-4), (2**20, 1e-3)] for collective in COLLECTIVES}
    cluster = _cluster(nodes, [(1e9, 1e-5)] * (len(nodes) - 1), [(len(nodes), len(nodes), points)])
    assert cluster.device_count == 4 * len(nodes)
    return [(node.device.name, node.number) for node in cluster.nodes]


def test_machines_that_are_about_as_fast_are_one_kind() -> None:
    assert numbers(machine("A100"), machine("A100", 0.9), machine("A100", 0.85)) == [("A100-80GB", 3)]


def test_a_slower_machine_with_the_same_device_is_another_kind() -> None:
    assert numbers(machine("A100"), machine("A100", 0.5), machine("A100", 0.5)) == [("A100-80GB", 1), ("A100-80GB", 2)]


def test_machines_stay_in_the_order_of_their_ranks() -> None:
    expected = [("A100-80GB", 1), ("V100-16GB", 1), ("A100-80GB", 1)]
    assert numbers(machine("A100"), machine("V100"), machine("A100")) == expected
