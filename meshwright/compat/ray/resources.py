"""How many workers Ray Train starts for a plan, and which resources of the Ray cluster each of them reserves."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from meshwright.cluster.detect import find_cluster
from meshwright.errors import InputError
from meshwright.plan import Plan


@dataclass(frozen=True)
class WorkerResources:
    """How many workers Ray Train starts, and how many GPUs and CPU cores each of them reserves."""

    workers: int
    gpus: int
    cores: int

    def __str__(self) -> str:
        per_worker = f"{self.gpus} GPU and {self.cores} CPU" if self.gpus else f"{self.cores} CPU"
        return f"{self.workers} worker{'s' if self.workers > 1 else ''} with {per_worker}{' each' * (self.workers > 1)}"


def choose_resources(
    plan: Plan | Literal["auto"], workers: int | None, cluster: str, available: Mapping[str, float]
) -> WorkerResources:
    """Returns the workers for this plan. Without a plan and a number, they are all GPUs of the Ray cluster or, without
    GPUs, all of its CPU cores. Raises an `InputError` if the plan needs another number, or the cluster has fewer."""
    has_gpus = available.get("GPU", 0) >= 1
    uses_gpus = has_gpus if cluster == "local" else find_cluster(cluster).kind == "cuda"
    cores = (plan.compute.threads if plan != "auto" else None) or 1
    resource, each = ("GPU", 1) if uses_gpus else ("CPU", cores)
    most = int(available.get(resource, 0) // each)
    if plan != "auto":
        if plan.gradients.servers:
            raise InputError(
                f"the plan ({plan.summary()}) has parameter servers, which need one machine: leave out --on"
            )
        if workers is not None and workers != plan.world_size:
            raise InputError(
                f"--workers {workers}: the plan ({plan.summary()}) is for {plan.world_size} ranks: leave out --workers,"
                " or change the plan"
            )
        workers = plan.world_size
    number = workers or max(1, most)
    if number > most:
        advice = f"use at most --workers {most}" if plan == "auto" and most else "use fewer ranks or threads"
        raise InputError(
            f"{number} workers with {each} {resource} each do not fit the Ray cluster, which has"
            f" {describe_resources(available)}: {advice}, or start more Ray nodes"
        )
    return WorkerResources(number, int(uses_gpus), cores)


def describe_resources(available: Mapping[str, float]) -> str:
    """Returns `2 GPUs and 16 CPUs`."""
    names = [name for name in ("GPU", "CPU") if available.get(name)]
    return " and ".join(f"{available[name]:g} {name}{'s' * (available[name] != 1)}" for name in names) or "no CPUs"
