"""Training in ranks that another launcher has started, such as torchrun, mpirun or srun. The ranks are running already.
They first make sure that all have the same job; then rank 0 chooses the plan and the run folder for all."""

import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

import torch

from meshwright import errors
from meshwright.calibrate.machines import find_measured_machines
from meshwright.cluster.cluster import Cluster
from meshwright.errors import InputError, MeshwrightError, OutOfMemory, UnequalPlan
from meshwright.job import Job, load_plan
from meshwright.messages.exchange import broadcast_value
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.processes.environment import Environment, read_environment
from meshwright.processes.heartbeat import Heartbeat
from meshwright.processes.output import redirect
from meshwright.processes.process_exit import record_failure_and_exit
from meshwright.processes.rank import run_rank
from meshwright.processes.world import World
from meshwright.train.check import check_job
from meshwright.train.job_agreement import agree_on_job
from meshwright.train.output.copies import check_copies
from meshwright.train.output.folder import (
    LockedRun,
    RunFolder,
    lock_run_folder,
    read_result,
    write_job_and_plan,
    write_reasons,
)
from meshwright.train.output.remote_run import local_run
from meshwright.train.rank import train_rank


class Chosen(Protocol):
    """A plan with the reasons for its fields (auto/decision.py), and the line that says why; None if there is none."""

    @property
    def plan(self) -> Plan: ...
    @property
    def reasons(self) -> Mapping[str, str]: ...
    @property
    def line(self) -> str | None: ...


ChoosePlan = Callable[[Cluster, str], Chosen]
"""Chooses the plan for a cluster and a run to resume (`lock_run_folder`). If `CheckPlan` has refused its plan, it is
called again, and chooses another one."""

TunePlan = Callable[[Plan, World], Chosen]
"""Returns a plan that `ChoosePlan` has chosen with the `compute` fields that are measured to be the fastest. All ranks
call it together; only rank 0 gets reasons, and only if something was measured."""

CheckPlan = Callable[[Job, Plan, World], None]
"""Checks the plan of a job in the ranks of the world, and raises `UnequalPlan` on all of them to refuse it."""

SuggestPlan = Callable[[OutOfMemory, Plan, int], OutOfMemory]
"""Adds to the error what was predicted for the plan on so many ranks, and the fastest plan that needs less memory."""

_SUGGESTION_S = 60.0  # how long the search for such a plan may take


@dataclass(frozen=True)
class _Run:
    """What all ranks train: the plan, and the run folder. `locked_run` is None on ranks other than 0."""

    plan: Plan
    folder: RunFolder
    locked_run: LockedRun | None = None


def train_as_launched_rank(
    job: Job,
    plan: Plan | ChoosePlan,
    cluster: Cluster,
    resume: str,
    recorded_steps: int = 0,
    suggest: SuggestPlan | None = None,
    check: CheckPlan | None = None,
    tune: TunePlan | None = None,
) -> dict[str, Any] | None:
    """Trains as this rank of a launched run. `plan` is a function if rank 0 is to choose the plan; if the cluster does
    not describe the ranks, every rank is a replica then. `resume` and `recorded_steps` are those of `run.train`.
    `suggest` adds to an error about full memory which plan needs less. `check` is called before the training begins,
    then `tune`. Returns the result on rank 0, and None on other ranks or if the run was stopped before its end."""
    results: list[dict[str, Any] | None] = []

    def main(world: World, heartbeat: Heartbeat) -> None:
        results.append(
            train_in_world(job, plan, cluster, resume, world, heartbeat, recorded_steps, check=check, tune=tune)
        )

    def end(error: BaseException, env: Environment, heartbeat: Heartbeat) -> NoReturn:
        # The other ranks wait for this one in the meantime.
        is_in_time = job.train.timeout_s >= _SUGGESTION_S
        if isinstance(error, OutOfMemory) and suggest is not None and heartbeat.folder is not None and is_in_time:
            with suppress(Exception):  # there may be too little memory to search for a plan
                error = suggest(error, load_plan(RunFolder(heartbeat.folder.parent).plan), env.size)
        record_failure_and_exit(error, env, heartbeat)

    run_rank(main, cluster.kind, job.train.timeout_s, end=end)
    return results[0]


def train_in_world(
    job: Job,
    plan: Plan | ChoosePlan,
    cluster: Cluster,
    resume: str,
    world: World,
    heartbeat: Heartbeat,
    recorded_steps: int,
    threads: int | None = None,
    check: CheckPlan | None = None,
    tune: TunePlan | None = None,
) -> dict[str, Any] | None:
    """Trains as this rank of the world, as `train_as_launched_rank` does. `threads` is how many threads torch uses if
    the plan does not say; by default the rank's share of the machine's cores."""
    agree_on_job(job, plan if isinstance(plan, Plan) else None, cluster.kind, recorded_steps, world)
    if isinstance(plan, Plan) and plan.world_size != world.size:
        launcher = read_environment().launcher
        raise InputError(f"the plan ({plan.summary()}) is for {plan.world_size} ranks, {launcher} started {world.size}")
    if not isinstance(plan, Plan) and cluster.name == "local" and world.size > world.local_size:
        cluster = find_measured_machines(world) or cluster
    run = _agree_on_run(job, plan, cluster, "auto" if world.attempt else resume, world)
    while check is not None and not world.attempt and not _is_accepted(job, plan, run, world, check):
        run = _agree_on_run(job, plan, cluster, resume, world)
    torch.set_num_threads(run.plan.compute.threads or threads or max(1, cluster.cores // world.local_size))
    if tune is not None and not isinstance(plan, Plan) and not world.attempt:
        run = _tuned(job, run, cluster, world, tune)
    redirect(run.folder.logs, world.rank, world.attempt)
    heartbeat.move_to(run.folder.logs, world.rank)
    finished = train_rank(job, run.plan, run.folder, world, heartbeat, recorded_steps)
    if run.locked_run:
        run.locked_run.lock.close()
    return read_result(run.folder) if finished and world.rank == 0 else None


def _tuned(job: Job, run: _Run, cluster: Cluster, world: World, tune: TunePlan) -> _Run:
    """Returns the run with its tuned plan, which is stored with the run."""
    tuned = tune(run.plan, world)
    if world.rank == 0:
        if tuned.plan != run.plan:
            write_job_and_plan(run.folder, job, tuned.plan, cluster)
        if tuned.reasons:
            write_reasons(run.folder, tuned.reasons)
    return replace(run, plan=tuned.plan)


def _is_accepted(job: Job, plan: Plan | ChoosePlan, run: _Run, world: World, check: CheckPlan) -> bool:
    """Returns whether the check accepts the plan of the run. If it does not, the run's folder is removed if it is new.
    Then a plan that was given raises the error, and another one is chosen otherwise."""
    try:
        check(job, run.plan, world)
        return True
    except UnequalPlan as error:
        if run.locked_run is not None:
            if run.locked_run.is_new and not run.folder.checkpoints.exists():
                shutil.rmtree(run.folder.path, ignore_errors=True)
            run.locked_run.lock.close()
        if isinstance(plan, Plan):
            raise
        if world.rank == 0:
            print(f"{error}; auto takes the next best plan", file=sys.stderr, flush=True)
        return False


def _agree_on_run(job: Job, plan: Plan | ChoosePlan, cluster: Cluster, resume: str, world: World) -> _Run:
    """Returns the plan and the run folder, which are the same on all ranks. Rank 0 chooses the plan, checks the job,
    then chooses and locks the folder. If this raises a `MeshwrightError`, every rank raises it."""
    if world.rank == 0:
        try:
            resume = local_run(job, resume, lambda line: print(line, file=sys.stderr, flush=True))
            chosen, reasons = (plan, {}) if isinstance(plan, Plan) else _choose(plan, cluster, resume, world)
            check_job(job, chosen, cluster.with_device_count(world.size))
            locked_run = lock_run_folder(job, resume)
            if not world.attempt:  # a run that goes on is not ended by a store that does not answer
                _check_copies(job, locked_run)
            write_job_and_plan(locked_run.folder, job, chosen, cluster, reasons)
        except MeshwrightError as error:
            broadcast_value({"error": _error_class(error), "message": str(error)})
            raise
        broadcast_value({"folder": locked_run.folder.path, "plan": chosen.model_dump(mode="json")})
        return _Run(chosen, locked_run.folder, locked_run)
    outcome = broadcast_value(None)
    if "error" in outcome:
        raise getattr(errors, outcome["error"])(outcome["message"])
    return _Run(Plan.model_validate(outcome["plan"]), RunFolder(outcome["folder"]))


def _check_copies(job: Job, run: LockedRun) -> None:
    try:
        check_copies(run.folder, job.checkpoint.copy_to)
    except MeshwrightError:
        if run.is_new:
            shutil.rmtree(run.folder.path, ignore_errors=True)  # wrong input leaves no files
        raise


def _choose(choose: ChoosePlan, cluster: Cluster, resume: str, world: World) -> tuple[Plan, Mapping[str, str]]:
    """Returns the plan that `choose` finds for the ranks that there are, with its reasons, and prints why. If the
    cluster does not describe them, or if its plan is for fewer ranks, every rank is a replica."""
    replicas = Plan(axes=Axes(replicate=world.size))
    if world.size == world.local_size:
        machines = cluster.with_device_count(world.size)
    elif cluster.device_count == world.size and sum(node.number for node in cluster.nodes) > 1:
        machines = cluster
    else:
        print(
            f"plan: {replicas.summary()}, without a prediction, as the ranks are on several machines, and the cluster"
            f" '{cluster.name}' does not describe them: describe them with --cluster, such as 2x8xH100, or start"
            " meshwright doctor with the same launcher once, which measures them",
            file=sys.stderr,
            flush=True,
        )
        return replicas, {}
    chosen = choose(machines, resume)
    if chosen.plan.world_size != world.size:
        return replicas, {}
    if chosen.line:
        print(chosen.line, file=sys.stderr, flush=True)
    return chosen.plan, chosen.reasons


def _error_class(error: MeshwrightError) -> str:
    """Returns the name of the class in errors.py that the error is an instance of."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
