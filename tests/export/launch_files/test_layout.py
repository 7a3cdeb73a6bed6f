"""How the ranks of a plan are divided among machines, and which numbers contradict each other."""

import pytest

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import detect_cpu
from meshwright.cluster.names import cluster_from_name
from meshwright.errors import InputError
from meshwright.export.launch_files.layout import Layout, lay_out
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes, Compute, Gradients

SIXTEEN = Plan(axes=Axes(replicate=16))
TWO_BY_EIGHT = cluster_from_name("2x8xH100")


def laid_out(
    plan: Plan = SIXTEEN,
    cluster: Cluster = TWO_BY_EIGHT,
    nodes: int | None = None,
    gpus: int | None = None,
    cores: int | None = None,
    is_searched: bool = False,
) -> Layout:
    return lay_out(plan, cluster, nodes, gpus, cores, 2, is_searched)


def numbers(layout: Layout) -> tuple[int, int]:
    return layout.nodes, layout.ranks_per_node


def test_the_cluster_decides_where_the_user_does_not() -> None:
    assert laid_out(is_searched=True) == Layout(2, 8, True, TWO_BY_EIGHT.cores // 8)
    assert numbers(laid_out(Plan(axes=Axes(replicate=4)))) == (1, 4)
    assert numbers(laid_out(nodes=4)) == (4, 4)
    assert numbers(laid_out(gpus=4)) == (4, 4)
    assert numbers(laid_out(nodes=1, gpus=16)) == (1, 16)


def test_cores_of_a_rank() -> None:
    assert laid_out(cores=5).cores_per_rank == 5
    assert laid_out(Plan(axes=Axes(replicate=16), compute=Compute(threads=3))).cores_per_rank == 3
    # GPUs of machines that nobody describes: a rank and the processes that load its data
    assert laid_out(cluster=detect_cpu(), nodes=2, gpus=8) == Layout(2, 8, True, 3)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"nodes": 4, "gpus": 8}, r"--nodes 4 × --gpus-per-node 8 = 32 ranks, but the plan .* has 16 ranks"),
        ({"nodes": 3}, r"--nodes 3: the plan .* has 16 ranks, which 3 machines cannot share"),
        ({"gpus": 5}, r"--gpus-per-node 5: the plan .* has 16 ranks, which is no multiple of 5"),
        ({"nodes": 4, "is_searched": True}, r"4 × 4 ranks, but .* cluster '2x8xH100' of 2 × 8 devices"),
        ({"plan": Plan(axes=Axes(replicate=32))}, r"has 32 ranks, but the cluster '2x8xH100' has 2 × 8 devices"),
        ({"plan": Plan(axes=Axes(replicate=12))}, r"has 12 ranks, but the cluster '2x8xH100' has 2 × 8 devices"),
        ({"plan": Plan(axes=Axes(replicate=8)), "is_searched": True}, "uses 8 of the 16 devices"),
        ({"cluster": detect_cpu().model_copy(update={"name": "2xcpu"}), "gpus": 8}, "'2xcpu' has no GPUs"),
        ({"plan": Plan(axes=Axes(replicate=2), gradients=Gradients(servers=1))}, "has parameter servers"),
    ],
)
def test_contradictions_are_refused_with_their_numbers(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        laid_out(**options)  # type: ignore[arg-type]
