"""Faults in how ranks with unequal shares of a batch are weighted."""

from dataclasses import dataclass
from typing import Any

from meshwright.train.session import Session
from tests.proof.injected_fault import InjectedFault


@dataclass(frozen=True)
class OneRankAsIfEven(InjectedFault):
    """One rank's samples get the weight that they would have if its share were even."""

    rank: int = 1

    def before(self, session: Session) -> None:
        if session.world.rank != self.rank:
            return
        right_total = session._forward_backward._start_total

        def total(examples: Any, samples: Any, divide: bool) -> Any:
            wait_for_total = right_total(examples, samples, divide)  # in which the other ranks take part
            local_count = sum(session._loss.count(example.target, count) for example, count in examples)
            return lambda: 0 * wait_for_total() + local_count * session.plan.data_ranks

        session._forward_backward._start_total = total  # type: ignore[method-assign, assignment]
