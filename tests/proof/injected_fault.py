"""`InjectedFault`: breaks a training on purpose inside the ranks, to see that a proof finds it and names the cause."""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from torch import Tensor

from meshwright.data.batch import Batch
from meshwright.train.loss.loss import Loss
from meshwright.train.session import Session
from tests.proof.cases import spread


class InjectedFault:
    """Given to `ProofRequest.prepare_session`, it is called with every rank's session before the first step. Each of
    its four methods runs on every rank and does nothing unless a fault overrides it. `session.world.rank` is the rank;
    `step` counts from 1. Instances are pickled for the ranks."""

    def before(self, session: Session) -> None:
        """Runs before anything is trained or recorded."""

    def on_batch(self, batch: Batch, session: Session, step: int) -> Batch:
        """Returns the batch that the rank computes on instead."""
        return batch

    def on_gradients(self, session: Session, step: int) -> None:
        """Runs when the ranks have combined their gradients, before clipping; in a worker of parameter servers, before
        its gradients are pushed."""

    def after_step(self, session: Session, step: int) -> None:
        """Runs after the optimizer step."""

    def __call__(self, session: Session) -> None:
        """Replaces the session's methods by ones that call the four above."""
        self.before(session)
        step, batches = session.step, session.batches

        def faulty_batches(*args: Any, **keywords: Any) -> Iterator[Batch]:
            for number, batch in enumerate(batches(*args, **keywords), 1):
                yield self.on_batch(batch, session, number)

        def faulty_step(batch: Any) -> Tensor:
            loss = step(batch)
            self.after_step(session, session.steps)
            return loss

        setattr(session, "batches", faulty_batches)  # noqa: B010 - mypy refuses to assign to a method
        setattr(session, "step", faulty_step)  # noqa: B010
        self._break_gradients(session)

    def _break_gradients(self, session: Session) -> None:
        """Wraps what reads the gradients first: a worker's push to the servers, or else the recorder."""
        owner, method = (
            (session, "full_gradients") if session.remote_optimizer is None else (session.remote_optimizer, "update")
        )
        read = getattr(owner, method)

        def read_broken(*args: Any) -> Any:
            self.on_gradients(session, session.steps + 1)
            return read(*args)

        setattr(owner, method, read_broken)


@dataclass(frozen=True)
class ComparesOwnSamples(InjectedFault):
    """Every rank computes a loss that compares samples on its own ones, as if it were a mean over samples."""

    def before(self, session: Session) -> None:
        session._loss = session._forward_backward.loss = Loss(spread, "samples")


@dataclass(frozen=True)
class ScaledGradients(InjectedFault):
    """Multiplies by `factor` the gradients of all parameters whose names match the pattern `parameter`, from step
    `step` on; on one rank, or on every rank where `rank` is None."""

    factor: float = 1.01
    rank: int | None = None
    parameter: str = "*"
    step: int = 1

    def on_gradients(self, session: Session, step: int) -> None:
        if step < self.step or self.rank not in (None, session.world.rank):
            return
        for name, parameter in session.module.named_parameters():
            if parameter.grad is not None and fnmatch(name, self.parameter):
                parameter.grad.mul_(self.factor)
