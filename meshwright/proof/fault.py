"""`Fault`: a training broken on purpose, inside of the ranks only, to see that a proof finds it and why."""

from dataclasses import dataclass
from fnmatch import fnmatch

from meshwright.data.batch import Batch
from meshwright.train.session import Session


class Fault:
    """Picklable. Each hook is called on every rank and does nothing unless a fault says so; `session.world.rank` tells
    where it is, `step` counts from 1."""

    def before(self, session: Session) -> None:
        """Before anything was trained or written down."""

    def on_batch(self, batch: Batch, session: Session, step: int) -> Batch:
        """What the rank computes on instead."""
        return batch

    def on_gradients(self, session: Session, step: int) -> None:
        """When the ranks have combined their gradients, before they are clipped."""

    def after_step(self, session: Session, step: int) -> None:
        """Behind the optimizer's step."""


@dataclass(frozen=True)
class Plant(Fault):
    """Gradients of the parameters that `parameter` matches are multiplied by `factor`. `rank` null: on every rank; from
    step `step` on."""

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
