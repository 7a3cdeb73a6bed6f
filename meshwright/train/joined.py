"""Training as a rank that torchrun started: the ranks are there already and agree on a run folder among themselves."""

from typing import Any

import torch
import torch.distributed as dist

from meshwright.cluster.cluster import Cluster
from meshwright.errors import InputError, MeshwrightError
from meshwright.job import Job
from meshwright.launch.output import redirect
from meshwright.launch.place import Place
from meshwright.launch.rank import run_rank
from meshwright.launch.world import World
from meshwright.plan import Axes, Plan
from meshwright.train.check import check
from meshwright.train.output.folder import Claim, RunFolder, claim, read_result, record
from meshwright.train.rank import train_rank


def train_joined(
    job: Job, plan: Plan | None, cluster: Cluster, resume: str, recorded_steps: int = 0
) -> dict[str, Any] | None:
    """The result on rank 0, None on the others and where a stop was asked for."""
    results: list[dict[str, Any] | None] = []

    def main(world: World, place: Place) -> None:
        results.append(_train(job, plan, cluster, resume, world, place, recorded_steps))

    run_rank(main, cluster.kind, job.train.timeout_s)
    return results[0]


def _train(
    job: Job, plan: Plan | None, cluster: Cluster, resume: str, world: World, place: Place, recorded_steps: int
) -> dict[str, Any] | None:
    chosen = plan or Plan(axes=Axes(replicate=world.size))
    if chosen.world_size != world.size:
        raise InputError(
            f"the plan ({chosen.summary()}) is for {chosen.world_size} ranks, torchrun started {world.size}"
        )
    torch.set_num_threads(chosen.compute.threads or max(1, cluster.cores // world.local_size))
    folder, claimed = _agree_on_folder(job, chosen, cluster, "auto" if world.attempt else resume, world)
    redirect(folder.logs, world.rank, world.attempt)
    place.move_to(folder.logs, world.rank)
    finished = train_rank(job, chosen, folder, world, place, recorded_steps)
    if claimed:
        claimed.lock.close()
    return read_result(folder) if finished and world.rank == 0 else None


def _agree_on_folder(
    job: Job, plan: Plan, cluster: Cluster, resume: str, world: World
) -> tuple[RunFolder, Claim | None]:
    """Rank 0 checks the job and claims a folder; its refusal is everybody's."""
    claimed: Claim | None = None
    news: list[Any] = [None]
    if world.rank == 0:
        try:
            check(job, plan, cluster.with_devices(world.size))
            claimed = claim(job, resume)
            record(claimed.folder, job, plan)
            news = [claimed.folder]
        except MeshwrightError as error:
            news = [error]
    if world.size > 1:
        dist.broadcast_object_list(news, src=0)
    if isinstance(news[0], MeshwrightError):
        raise news[0]
    return news[0], claimed
