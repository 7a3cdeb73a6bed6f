"""Records what a run does instead of its plan: where the compiler or the capture of a CUDA graph has failed, plan.yaml
says so from then on, with the reason in reasons.yaml. A run that goes on does not try again."""

from typing import Any

from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.train.output.folder import RunFolder, read_reasons, write_job_and_plan
from meshwright.train.session import Session
from meshwright.train.step_runner import StepRunner

_COMPILER = "the compiler failed in this run, as its log says"


class FallbackRecord:
    """The plan of a run, which `update` compares with what runs on this rank. Only rank 0 calls it."""

    def __init__(self, folder: RunFolder, job: Job, session: StepRunner) -> None:
        self._folder, self._job, self._session = folder, job, session
        self._plan = session.plan

    def update(self) -> None:
        if changes := _fallbacks(self._session, self._plan):
            fields = {name: value for name, (value, _) in changes.items()}
            compute = self._plan.compute.model_copy(update=fields)
            self._plan = self._plan.model_copy(update={"compute": compute})
            why = {f"compute.{name}": reason for name, (_, reason) in changes.items()}
            write_job_and_plan(self._folder, self._job, self._plan, reasons={**read_reasons(self._folder), **why})


def _fallbacks(session: StepRunner, plan: Plan) -> dict[str, tuple[Any, str]]:
    """The fields of `compute` that the steps do not follow, with what they do instead and why."""
    changes: dict[str, tuple[Any, str]] = {}
    if not isinstance(session, Session):  # a worker of parameter servers
        return changes
    if plan.compute.compile != "none" and not session.parallel.compilation.is_on:
        changes = {"compile": ("none", _COMPILER), "compile_mode": ("default", _COMPILER)}
    if plan.compute.cuda_graphs and session.graphs is not None and session.graphs.failure is not None:
        changes["cuda_graphs"] = (False, f"the step could not be captured: {session.graphs.failure}")
    return changes
