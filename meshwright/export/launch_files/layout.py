"""On how many machines the ranks of a plan run, and with how many GPUs and CPU cores each."""

from dataclasses import dataclass

from meshwright.cluster.cluster import Cluster
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.plan_rules.table import check_rules


@dataclass(frozen=True)
class Layout:
    """`ranks_per_node` ranks on each of `nodes` machines, on GPUs or on CPUs, with `cores_per_rank` CPU cores each."""

    nodes: int
    ranks_per_node: int
    on_gpus: bool
    cores_per_rank: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def gpus_per_node(self) -> int:
        return self.ranks_per_node if self.on_gpus else 0

    def describe(self) -> str:
        machines = "1 machine" if self.nodes == 1 else f"{self.nodes} machines"
        kind = "GPU" if self.on_gpus else "CPU"
        return f"{machines} × {self.ranks_per_node} {kind} rank{'s' if self.ranks_per_node > 1 else ''}"


def lay_out(
    plan: Plan,
    cluster: Cluster,
    nodes: int | None,
    gpus_per_node: int | None,
    cores_per_rank: int | None,
    loader_processes: int,
    is_searched: bool,
) -> Layout:
    """Returns the layout of the plan's ranks. `nodes`, `gpus_per_node` and `cores_per_rank` are what the user demands;
    what is None follows from the plan and the cluster. `loader_processes` load the data of a rank; they count where the
    machines with the GPUs are not described. `is_searched`: the plan was found for this cluster, so that the layout
    must fit into it. Raises an `InputError` with the numbers if they contradict each other."""
    check_rules(plan, "launch files")
    _check_plan_fills_cluster(plan, cluster, is_searched)
    _check_gpus(cluster, gpus_per_node)
    layout_nodes, ranks_per_node = _divide(plan, cluster, nodes, gpus_per_node)
    machines, devices = _machine_count(cluster), _devices_per_machine(cluster)
    if is_searched and (layout_nodes > machines or ranks_per_node > devices):
        raise InputError(
            f"--nodes and --gpus-per-node ask for {layout_nodes} × {ranks_per_node} ranks, but the plan was found for"
            f" the cluster '{cluster.name}' of {machines} × {devices} devices: name the cluster that you have"
            f" (--cluster {layout_nodes}x{ranks_per_node}x…), or give a plan with --plan"
        )
    on_gpus = gpus_per_node is not None or cluster.kind == "cuda"
    if on_gpus and cluster.kind == "cpu":
        share = 1 + loader_processes
    else:
        share = plan.compute.threads or max(1, cluster.cores // ranks_per_node)
    return Layout(layout_nodes, ranks_per_node, on_gpus, cores_per_rank or share)


def _check_plan_fills_cluster(plan: Plan, cluster: Cluster, is_searched: bool) -> None:
    """The ranks search again for the plan. If they were fewer than the cluster's devices, they would find another."""
    if is_searched and plan.world_size != cluster.device_count:
        raise InputError(
            f"plan: auto is {plan.summary()} here, which uses {plan.world_size} of the {cluster.device_count} devices"
            f" of cluster '{cluster.name}': write it to a file (`meshwright plan JOB --output FILE`), and give --plan"
        )


def _check_gpus(cluster: Cluster, gpus_per_node: int | None) -> None:
    if gpus_per_node is not None and cluster.kind == "cpu" and cluster.name != "local":
        raise InputError(
            f"--gpus-per-node {gpus_per_node}: the cluster '{cluster.name}' has no GPUs: name another one with"
            " --cluster, or leave --gpus-per-node out"
        )


def _divide(plan: Plan, cluster: Cluster, nodes: int | None, gpus_per_node: int | None) -> tuple[int, int]:
    """Returns the numbers of machines and of ranks on each, whose product is the number of ranks of the plan."""
    ranks = plan.world_size
    the_plan = f"the plan ({plan.summary()}) has {ranks} rank{'s' if ranks > 1 else ''}"
    if nodes is not None and gpus_per_node is not None:
        if nodes * gpus_per_node != ranks:
            raise InputError(
                f"--nodes {nodes} × --gpus-per-node {gpus_per_node} = {nodes * gpus_per_node} ranks, but {the_plan}:"
                " leave one of the options out, or give a plan for these machines (--plan, or plan: auto with"
                " --cluster)"
            )
        return nodes, gpus_per_node
    if nodes is not None:
        if ranks % nodes:
            raise InputError(
                f"--nodes {nodes}: {the_plan}, which {nodes} machines cannot share equally: choose a divisor of {ranks}"
            )
        return nodes, ranks // nodes
    if gpus_per_node is not None:
        if ranks % gpus_per_node:
            raise InputError(
                f"--gpus-per-node {gpus_per_node}: {the_plan}, which is no multiple of {gpus_per_node}: choose a"
                f" divisor of {ranks}"
            )
        return ranks // gpus_per_node, gpus_per_node
    machines, devices = _machine_count(cluster), _devices_per_machine(cluster)
    per_machine = min(ranks, devices)
    if ranks % per_machine or ranks > machines * devices:
        raise InputError(
            f"{the_plan}, but the cluster '{cluster.name}' has {machines} × {devices} devices: say --nodes and"
            " --gpus-per-node, or name the cluster with --cluster"
        )
    return ranks // per_machine, per_machine


def _machine_count(cluster: Cluster) -> int:
    return sum(node.number for node in cluster.nodes)


def _devices_per_machine(cluster: Cluster) -> int:
    """Returns the number of devices that every machine has."""
    return min(node.count for node in cluster.nodes)
