"""In a user's own loop, an error of communication in a method of the session becomes one that says which rank is stuck.
Under `meshwright train`, processes/rank.py does the same."""

import sys
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar
from weakref import finalize, ref

from meshwright.errors import CollectiveError
from meshwright.processes.communication_errors import communication_error, explain_communication_error
from meshwright.processes.heartbeat import Heartbeat, describe_progress
from meshwright.processes.stall.collection import Finding
from meshwright.processes.stall.departure import Departure
from meshwright.processes.stall.ending import Ending, Progress
from meshwright.processes.stall.out_of_memory import describe_out_of_memory, is_out_of_memory
from meshwright.processes.stall.watchdog import Watchdog, make_watchdog
from meshwright.processes.torch_private import default_store
from meshwright.processes.world import World
from meshwright.user.code import describe_error

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Explainer:
    """Explains errors of communication with the help of a watchdog."""

    def __init__(self, world: World, heartbeat: Heartbeat, timeout_s: float) -> None:
        self._world = world
        self._heartbeat = heartbeat
        self._timeout_s = timeout_s
        self._watchdog: Watchdog | None = make_watchdog(
            world, world.store or default_store(), heartbeat, timeout_s, _warn, _print
        )
        self.progress = Progress(world.rank, heartbeat)
        if self._watchdog is not None:
            finalize(self, Ending(self._watchdog, self.progress).leave)
            _explain_uncaught(self)

    def note_steps(self, steps: int) -> None:
        """Notes how many steps the session has made, which other ranks are told when this one leaves its loop."""
        self.progress.note_steps(steps)

    def note_failure(self, error: BaseException) -> None:
        """Notes the error that ends the program."""
        self.progress.error = describe_error(error)

    def explain(self, error: BaseException) -> CollectiveError | None:
        """Returns an error that says which rank is stuck or has left; None if the error has nothing to do with
        communication."""
        if self._watchdog is None:
            return None
        is_known = isinstance(error, CollectiveError) or communication_error(error) is not None
        left = self._watchdog.departure(waits=False) if is_known else None
        if left is not None:
            return self._departure_error(left)
        explained = explain_communication_error(
            error, self._world, self._heartbeat, self._timeout_s, self._heartbeat.folder, self._watchdog
        )
        if explained is None or explained.report is not None:
            return explained
        left = self._watchdog.departure(waits=True)  # its connections may be closed before it can say that it leaves
        return explained if left is None else self._departure_error(left)

    def _departure_error(self, left: Departure) -> CollectiveError:
        line = self.progress.describe(left)
        if self._watchdog is not None:
            self._watchdog.tell_wait(line)
        return CollectiveError(line)

    def add_memory(self, error: Exception) -> None:
        """Adds to an error about full memory which rank it is, where it was, and what was in memory by kind."""
        where = describe_progress(self._heartbeat.step, self._heartbeat.activity)
        error.add_note(f"rank {self._world.rank}{where}: {describe_out_of_memory(error, self._heartbeat)}")


class Explaining(Protocol):
    """A class with methods that exchange something with other ranks. `explainer` is None outside of user's own
    loops."""

    explainer: Explainer | None


ExplainingT = TypeVar("ExplainingT", bound=Explaining)


def explains_errors(
    method: Callable[Concatenate[ExplainingT, Parameters], Result],
) -> Callable[Concatenate[ExplainingT, Parameters], Result]:
    """Lets a method raise a `CollectiveError` that names the rank that is stuck, in place of an error of torch."""

    @wraps(method)
    def explained(self: ExplainingT, *arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        progress = None if self.explainer is None else self.explainer.progress
        if progress is not None:
            progress.begin_call()
        try:
            return method(self, *arguments, **keywords)
        except Exception as error:
            if self.explainer is not None and is_out_of_memory(error):
                self.explainer.add_memory(error)
                raise  # of the same class, because loops catch it and try a smaller batch
            problem = None if self.explainer is None else self.explainer.explain(error)
            if problem is None or problem is error:
                raise
            raise _with_report(problem) from error
        finally:
            if progress is not None:
                progress.end_call()

    return explained


def _with_report(error: CollectiveError) -> CollectiveError:
    if error.report:
        error.add_note(f"the report of all ranks: {error.report}")
    return error


def _explain_uncaught(explainer: Explainer) -> None:
    """Adds an explanation to an error of communication that ends the program, such as that of a collective which the
    user's loop calls itself."""
    weak, previous = ref(explainer), sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        explainer = weak()
        if explainer is not None:
            explainer.note_failure(error)
        if explainer is not None and not isinstance(error, CollectiveError) and not hasattr(error, "__notes__"):
            explained = explainer.explain(error)
            if explained is not None:
                error.add_note(str(explained))
                if explained.report:
                    error.add_note(f"the report of all ranks: {explained.report}")
        return previous(kind, error, trace)

    sys.excepthook = hook


def _warn(finding: Finding) -> None:
    _print(finding, "warning: ")


def _print(finding: Finding, kind: str = "") -> None:
    where = f"\nthe report of all ranks: {finding.report}" if finding.report else ""
    print(f"{kind}{finding.line}{where}", file=sys.stderr, flush=True)
