"""Decides with which plan a job is trained, and why: `decide`.

    search      the plan of the run that goes on, the job's own plan, or the fastest by prediction     `plan_of_job`
    precision   `numerics.precision: auto` of a job's own plan: the fastest by measured steps
    check       the job's fields, and, where a plan divides the model, that it trains the same model
    compute     what is compiled and captured, and which kernels run: the fastest by measured steps

The run executes the plan that comes out, and decides nothing. Ranks that another launcher has started make the same
decision together (launched.py, train/launched.py).
"""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Literal, Protocol

from meshwright.auto.decision import WRITTEN, Decision, reasons_of
from meshwright.auto.inputs import planning_data, planning_inputs
from meshwright.auto.tuned import variants_of
from meshwright.cluster.busy import busy_sentence
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import check_is_local
from meshwright.errors import InputError, MeshwrightError, UnequalPlan, UserCodeError
from meshwright.job import Job, load_plan
from meshwright.model_io.batch import split_batch
from meshwright.parallel.tensor.dimension_partition import dimension_partition_plan
from meshwright.plan import Plan
from meshwright.plan_fields.constraints import Constraints
from meshwright.plan_fields.groups import Axes
from meshwright.planner.constraints.apply import keeps_constraints
from meshwright.planner.explanation.choice import describe_choice
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.measured_search import measured_search
from meshwright.planner.offload import search_with_offload
from meshwright.planner.profiles import Profiles
from meshwright.planner.search_result import SearchResult
from meshwright.processes.environment import check_can_be_alone
from meshwright.progress import phase, say
from meshwright.simulator.predict import Prediction, predict_plan
from meshwright.train.build import construct_model
from meshwright.train.check import check_job, check_rank_count
from meshwright.train.job_parts import JobParts
from meshwright.train.output.folder import RunFolder, device_text, find_run_to_resume
from meshwright.train.output.origin import read_run_file
from meshwright.train.tuning.job import tune_job
from meshwright.train.tuning.precision import choose_precision
from meshwright.user.code import describe_error, first_line, user_position, working_folder_kept

CheckPlan = Callable[[Plan], None]
"""Raises an `InputError` for plans that must not be chosen."""

# Fields that no search changes: they are another way to train, and not a faster way to train the same model.
UNSEARCHED = (
    *("gradients.precision", "gradients.powersgd_rank", "gradients.local_steps", "gradients.local_after"),
    *("gradients.servers", "gradients.updates", "gradients.staleness"),
    *("numerics.batch_norm", "shares.adaptive", "compute.threads", "compute.compile_mode"),
)


class CheckOfPlans(Protocol):
    """Raises `UnequalPlan` for a plan that does not train the same model as one device. `refused` is called with the
    plans of later searches, and raises an `InputError` for those that divide the model in the same way."""

    @property
    def refused(self) -> CheckPlan: ...

    def __call__(self, plan: Plan) -> None: ...


def decide(
    parts: JobParts,
    cluster: Cluster,
    plan: "Plan | Literal['auto']",
    resume: str = "never",
    check: CheckOfPlans | None = None,
) -> Decision:
    """Returns the complete plan that this machine trains a job with, and why. `plan` is that of the job, and `resume`
    that of `lock_run_folder`. Unless it is None, `check` is called with the plan; if it finds the plan of `auto`
    unequal, the next best one is taken."""
    with working_folder_kept():  # the model's code may leave it
        decision = plan_of_job(parts, cluster, plan, resume)
    while True:
        try:
            decision = _checked(parts, cluster, decision, check)
            break
        except UnequalPlan as error:
            if plan != "auto" or check is None:
                raise
            other = plan_of_job(parts, cluster, "auto", refuse=check.refused)
            if other.plan == decision.plan:  # nothing else can be predicted, or the job's data determine the plan
                raise
            say(f"{error}; auto takes the next best plan")
            decision = other
    if decision.line:
        say(decision.line)
    with working_folder_kept():
        tuned, line = tune_job(decision.plan, decision.variants, parts, cluster, decision.step_s, say)
    return decision.measured(tuned, line)


def _checked(parts: JobParts, cluster: Cluster, decision: Decision, check: CheckOfPlans | None) -> Decision:
    """Returns the decision with a precision. Raises a `MeshwrightError` if the plan cannot be run, or must not be."""
    check_can_be_alone()
    check_is_local(cluster)
    check_rank_count(decision.plan, cluster)
    with phase("checking the job and the plan"), working_folder_kept():
        choice = choose_precision(decision.plan, parts.job, cluster, parts)
    if choice.reason:
        say(choice.reason)
        decision = decision.changed(choice.plan, choice.reason)
    with phase("checking the job and the plan"), working_folder_kept():
        check_job(parts.job, decision.plan, cluster, parts)
    if check is not None:
        with working_folder_kept():
            check(decision.plan)
    return decision


def plan_of_job(
    parts: JobParts,
    cluster: Cluster,
    plan: "Plan | Literal['auto']",
    resume: str = "never",
    refuse: CheckPlan | None = None,
) -> Decision:
    """Returns the plan of a job, before anything of it is measured or checked. It has no prediction if the machine has
    not been measured, if the model or the plan cannot be predicted, or if the plan leaves its precision to the run.

    If `plan` is "auto", the result is the plan of the run that `resume` (of `lock_run_folder`) continues, if that plan
    suits the job and the cluster; else the fastest plan that the job's `allow` permits. If no prediction is possible,
    it is the plan in which every device is a replica. `refuse` raises an `InputError` for plans that `auto` must not
    choose.
    """
    job = parts.job
    if plan == "auto" and (run := find_run_to_resume(job, resume)) and (stored := _stored_plan(run, job, cluster)):
        before = f"with which {run.path} was trained before"
        decision = _predicted(parts, cluster, stored, f"that {before}")
        return replace(decision, line=f"plan: {stored.summary()}, {before}")
    if plan == "auto" and job.data.partition == "dimension":
        return _predicted(parts, cluster, dimension_plan(parts, cluster), "data.partition is dimension")
    if plan != "auto":
        return _predicted(parts, cluster, plan, WRITTEN)
    if job.constraints and not _is_measured(cluster):
        raise InputError(
            f"constraints ({job.constraints.describe()}) need predictions, but this machine is not measured: run"
            " meshwright doctor once"
        )
    if not _is_measured(cluster):
        return _replicas(job, cluster, ", as this machine is not measured: run meshwright doctor once")
    try:
        inputs, profiles = planning_inputs(parts, cluster, even_shares=False)
        if refuse is not None:
            inputs = replace(inputs, check_plan=both_checks(inputs.check_plan, refuse))
    except UserCodeError:  # a second attempt would execute the failing code again, for example the import of a file
        raise
    except Exception as error:
        return _unpredicted(job, cluster, error)
    try:
        return _searched(inputs, profiles)
    except Exception as error:  # the model cannot be traced, or no plan is predicted to fit: train anyway
        return _unpredicted(job, cluster, error)


def _unpredicted(job: Job, cluster: Cluster, error: Exception) -> Decision:
    """Every device is a replica, because of this error; but constraints need predictions."""
    if job.constraints:
        raise error
    return _replicas(job, cluster, f": {why_unpredicted(error)}")


def _replicas(job: Job, cluster: Cluster, because: str) -> Decision:
    """The plan that is taken without a prediction: every device is a replica, but there are no more replicas than
    samples."""
    plan, why = replicate_plan(cluster, job.train.global_batch), f"without a prediction{because}"
    return Decision(plan, reasons_of(plan, why), line=f"plan: {plan.summary()}, {why}")


def _searched(inputs: PlanningInputs, profiles: Profiles) -> Decision:
    """The fastest plan by prediction."""
    if inputs.cluster.kind == "cpu":
        result, inputs = measured_search(inputs, profiles)
    else:  # on GPUs, the operators are not measured: it would take memory of a device that the ranks need
        result = search_with_offload(inputs, profiles)
    best = result.ranked[0]
    line = _with_warning(describe_choice(result, inputs, profiles), inputs.cluster)
    variants = partial(variants_of, best.plan, inputs, profiles)
    return Decision(best.plan, _reasons_of_search(result, inputs.constraints), best.prediction, line, variants)


def _reasons_of_search(result: SearchResult, constraints: Constraints) -> dict[str, str]:
    plan = result.ranked[0].plan
    found = f"as in the fastest of {result.candidate_count:,} plans, by prediction"
    return {
        **reasons_of(plan, found, found),
        **dict.fromkeys(UNSEARCHED, "the default, which no search changes"),
        **dict.fromkeys(constraints.fixed, "fixed by the constraints"),
    }


def _predicted(parts: JobParts, cluster: Cluster, plan: Plan, reason: str) -> Decision:
    """The decision for a plan that is given, with its prediction if one is possible."""
    decision = Decision(plan, reasons_of(plan, reason))
    if not _is_measured(cluster):
        return decision
    try:
        inputs, profiles = planning_inputs(parts, cluster, even_shares=False)
    except UserCodeError:
        raise
    except Exception:
        return decision
    with suppress(Exception):  # the model cannot be traced: train anyway
        if plan.numerics.precision != "auto":  # which precision is the fastest is measured
            return replace(decision, prediction=_prediction(inputs, profiles, cluster, plan))
    return decision


def _prediction(inputs: PlanningInputs, profiles: Profiles, cluster: Cluster, plan: Plan) -> Prediction:
    profile = profiles.get(plan.numerics.precision, plan.memory.recompute)
    ranks = cluster
    if cluster.is_uniform or plan.world_size > cluster.device_count:
        ranks = cluster.with_device_count(min(plan.world_size, cluster.device_count))
    return predict_plan(ranks, profile, plan, inputs.global_batch, inputs.optimizer, runtime=inputs.runtime)


def why_unpredicted(error: Exception) -> str:
    """Returns why nothing was predicted. An error that is neither one of Meshwright's own nor raised in the user's code
    is named as a fault of Meshwright."""
    if isinstance(error, MeshwrightError):
        return first_line(error)
    whose = "" if user_position(error) else "a fault of Meshwright, which we ask you to report: "
    return f"{whose}{describe_error(error)}"


def _with_warning(line: str, cluster: Cluster) -> str:
    """The line, with a second one if other programs disturbed the measurement that the plan is based on."""
    busy = busy_sentence(cluster)
    return f"{line}\nwarning: {busy}" if busy else line


def _stored_plan(run: RunFolder, job: Job, cluster: Cluster) -> Plan | None:
    """Returns the plan with which a run has been trained so far, so that it goes on with the same bits. Returns None if
    it changes more than the job allows, if it is for another number or another kind of devices, or if it cannot be
    read."""
    try:
        plan = load_plan(run.plan, text=read_run_file(run.plan))
        # Runs of earlier versions do not say which device they were trained on.
        if os.path.lexists(run.device) and read_run_file(run.device) != device_text(cluster):
            return None
    except MeshwrightError:
        return None
    ranks, devices = plan.world_size, cluster.device_count
    uses_devices = ranks == devices or (job.train.global_batch < devices and ranks < devices)
    if not uses_devices or not keeps_constraints(plan, job.constraints):
        return None
    return plan if plan.stays_within(job.allow) or job.constraints.beyond(job.allow) else None


def dimension_plan(parts: JobParts, cluster: Cluster) -> Plan:
    """Returns the plan of a job with `data.partition: dimension`, in which each rank gets some of the features of every
    sample."""
    structure = planning_data(parts).structure
    example = split_batch(structure.sample, structure.target)
    return dimension_partition_plan(construct_model(parts.job), example, cluster.device_count)


def replicate_plan(cluster: Cluster, global_batch: int) -> Plan:
    """Returns the plan that is used without a prediction: every device is a replica, but there are no more replicas
    than samples."""
    return Plan(axes=Axes(replicate=min(cluster.device_count, global_batch)))


def _is_measured(cluster: Cluster) -> bool:
    return all(node.device.is_known for node in cluster.nodes)


def both_checks(first: Callable[[Plan], None], second: Callable[[Plan], None]) -> Callable[[Plan], None]:
    """Returns a check of a plan that makes both checks."""

    def check_plan(plan: Plan) -> None:
        first(plan)
        second(plan)

    return check_plan
