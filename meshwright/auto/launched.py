"""Chooses the plan of a job for ranks that another launcher has started (train/launched.py), and tunes it in them."""

import sys
from contextlib import suppress
from typing import Any

from meshwright.auto.decide import CheckPlan, plan_of_job
from meshwright.auto.decision import Decision
from meshwright.cluster.cluster import Cluster
from meshwright.errors import UnequalPlan
from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.train.job_parts import JobParts
from meshwright.train.job_session import build_session
from meshwright.train.session import Session
from meshwright.train.tuning.job import budget_of_job, may_tune, others_of_job
from meshwright.train.tuning.job_batches import first_batches
from meshwright.train.tuning.kept import choice_file
from meshwright.train.tuning.ranks import TuningRequest, tune_in_ranks
from meshwright.train.tuning.variants import LEAST_BUDGET_S, expected_compile_s


class PlanChooser:
    """Chooses the plan on rank 0 when it is called, and tunes it on all ranks."""

    def __init__(self, job: Job, refuse: CheckPlan | None = None) -> None:
        """`refuse` is that of `plan_of_job`."""
        self._job, self._refuse = job, refuse
        self._chosen: tuple[Decision, JobParts, Cluster] | None = None

    def __call__(self, machines: Cluster, resume: str) -> Decision:
        # Called again, because a plan was refused that may have been the stored one of the run to resume.
        resumed = resume if self._chosen is None else "never"
        parts = JobParts(self._job)
        chosen = plan_of_job(parts, machines, "auto", resumed, self._refuse)
        if self._chosen is not None and self._chosen[0].plan == chosen.plan:
            raise UnequalPlan(
                f"auto finds no other plan than {chosen.plan.summary()}, which does not train the same model as one"
                " device: choose a plan with --plan"
            )
        self._chosen = chosen, parts, machines
        return chosen

    def tune(self, plan: Plan, world: World) -> Decision:
        """Returns the plan with the fastest variant of its `compute` fields. All ranks call this together. Only rank 0
        gets the reasons for the plan, and only if something was measured."""
        request = None
        with suppress(Exception):  # whatever the job's code raises: the other ranks wait for the request
            request = self._request(plan)
        decision = self._chosen[0] if self._chosen is not None and self._chosen[0].plan == plan else Decision(plan)
        self._chosen = None  # its data sets and model would keep their memory
        lines: list[str] = []
        batches: list[Any] = []

        def session(own_plan: Plan, alone: World) -> Session:
            return build_session(self._job, own_plan, alone, lambda activity: None)

        def take(session: Session) -> list[Any]:
            share = plan.share_sizes(self._job.train.global_batch)[world.rank]
            batches.extend([] if batches else first_batches(self._job, session, max(1, share)))
            return batches

        def notify(line: str) -> None:
            lines.append(line)
            print(line, file=sys.stderr, flush=True)

        tuned = tune_in_ranks(plan, request, session, take, world, notify)
        return decision.measured(tuned, lines[-1]) if lines else Decision(tuned)

    def _request(self, plan: Plan) -> TuningRequest | None:
        """What rank 0 wants to be timed; None on other ranks."""
        if self._chosen is None or self._chosen[0].plan != plan or not may_tune(self._job, plan):
            return None
        chosen, parts, machines = self._chosen
        budget_s = budget_of_job(parts, chosen.step_s)
        is_long = budget_s >= LEAST_BUDGET_S
        if not (is_long or plan.compute.compile != "none") or not (variants := chosen.variants()):
            return None
        file = choice_file(plan, parts.model, parts.sample, others_of_job(self._job, machines))
        return TuningRequest(variants, budget_s, expected_compile_s(parts.model), file)
