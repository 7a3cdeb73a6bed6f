"""`meshwright train --nodes`: starts the ranks of this machine, one of several that train a job together. Each rank is
this module's `main`, and trains as a rank of torchrun does."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from meshwright.errors import InputError
from meshwright.processes.nodes.address import NodeCount, check_node_rank, parse_address, parse_node_count

if TYPE_CHECKING:
    from meshwright.cluster.cluster import Cluster
    from meshwright.job import Job
    from meshwright.plan import Plan

LEAST_ELASTIC_TIMEOUT_S = 30.0  # a lost machine is noticed after 15 s, and the others wait 10 s for more to join


@dataclass(frozen=True)
class RankRequest:
    """The arguments and options of `meshwright train` that a rank needs."""

    job: str
    plan: str | None
    cluster: str | None
    resume: str
    record: int
    settings: list[str]
    as_json: bool
    unproved: bool = False


def train_on_nodes(
    request: RankRequest,
    job: "Job",
    plan: "Plan | Literal['auto']",
    nodes_text: str,
    node_rank: int | None,
    rendezvous: str | None,
) -> None:
    """Trains as machine `node_rank` of `nodes_text` machines. Rank 0 prints the result."""
    from meshwright.processes.local.fork_server import preloaded

    nodes = parse_node_count(nodes_text)
    if nodes.most == 1:
        raise InputError(f"--nodes {nodes_text}: one machine needs neither --nodes nor --rendezvous: leave them out")
    rank = check_node_rank(node_rank, nodes)
    if rendezvous is None:
        raise InputError(
            f"--nodes {nodes}: say where the machines meet, with --rendezvous HOST:PORT: an address of machine 0 in a"
            " private network, and a free port there"
        )
    address = parse_address(rendezvous)
    if nodes.is_elastic and job.train.timeout_s < LEAST_ELASTIC_TIMEOUT_S:
        raise InputError(
            f"--nodes {nodes} with train.timeout_s {job.train.timeout_s:g}: it takes 25 s until a lost machine is"
            f" noticed and the others meet again, so the run would end: set train.timeout_s to at least"
            f" {LEAST_ELASTIC_TIMEOUT_S:g}"
        )
    with preloaded("meshwright.train.rank", job.train.spare):
        from meshwright.cluster.detect import find_cluster
        from meshwright.processes.nodes.launch import NodeSettings, launch_node
        from meshwright.processes.nodes.rendezvous import Node
        from meshwright.train.run import DETERMINISTIC

        cluster = find_cluster(request.cluster or job.cluster)
        local_ranks = ranks_per_node(plan, cluster, nodes)
        threads = (plan.compute.threads if plan != "auto" else None) or max(1, cluster.cores // local_ranks)
        launch_node(
            "meshwright.cli.launchers.nodes",
            [json.dumps(asdict(request))],
            Node(rank, nodes, address, job.name, local_ranks),
            NodeSettings(threads, job.train.restarts, job.train.grace_s, job.train.timeout_s, job.train.spare),
            DETERMINISTIC if job.train.deterministic else {},
        )


def ranks_per_node(plan: "Plan | Literal['auto']", cluster: "Cluster", nodes: NodeCount) -> int:
    """Returns how many ranks each machine has. The cluster describes all machines, or one of several equal ones. Raises
    an `InputError` if plan, cluster and `--nodes` contradict each other, or if this machine has fewer devices."""
    from meshwright.cluster.detect import check_is_local
    from meshwright.train.check import check_rank_count

    machines = sum(node.number for node in cluster.nodes)
    if machines == 1:
        one_machine = cluster
    elif machines != nodes.most:
        raise InputError(f"--nodes {nodes}: the cluster '{cluster.name}' has {machines} machines: name as many")
    else:
        one_machine = cluster.with_device_count(min(node.count for node in cluster.nodes))
    devices = one_machine.device_count
    check_is_local(one_machine)
    if plan == "auto":
        return devices
    if plan.gradients.servers:
        raise InputError(
            f"the plan ({plan.summary()}) has parameter servers, which need one machine: leave out --nodes"
        )
    if nodes.is_elastic:
        raise InputError(
            f"--nodes {nodes}: the plan ({plan.summary()}) is for {plan.world_size} ranks, whichever machines join:"
            f" give a single number, or plan: auto"
        )
    ranks, rest = divmod(plan.world_size, nodes.most)
    is_described = cluster.name != "local" or cluster.kind == "cuda"
    if rest or (is_described and ranks != devices):
        raise InputError(
            f"the plan ({plan.summary()}) has {plan.world_size} ranks, but --nodes {nodes} × {devices} devices (cluster"
            f" '{cluster.name}') are {nodes.most * devices}: change --nodes, --cluster or the plan"
        )
    check_rank_count(plan.model_copy(update={"axes": plan.axes.model_copy(update={"replicate": ranks})}), one_machine)
    return ranks


def main() -> None:
    """Trains as a rank, with a `RankRequest` in JSON as its argument."""
    from meshwright.cli.job_file import load_train_job
    from meshwright.cli.training import print_result, train_as_rank
    from meshwright.job import load_plan
    from meshwright.processes.environment import read_environment
    from meshwright.processes.nodes.launch import write_result

    request = RankRequest(**json.loads(sys.argv[1]))
    job = load_train_job(Path(request.job), request.settings)
    plan = load_plan(request.plan) if request.plan else job.plan
    result = train_as_rank(job, plan, request.cluster, request.resume, request.record, request.unproved)
    if read_environment().rank == 0:
        write_result(result)
        if result is not None:
            print_result(result, request.as_json)
