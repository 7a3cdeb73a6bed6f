"""What the end of a run says about the loads of experts that are divided over ranks."""

from typing import Any

from meshwright.parallel.expert.loads import gather_counts, report_loads
from meshwright.train.output.progress import Display
from meshwright.train.session import Session
from meshwright.train.step_runner import StepRunner


def expert_result(session: StepRunner, display: Display, rank: int) -> dict[str, Any]:
    """Returns what result.json has of it: the tokens of each expert by layer, or nothing. Rank 0 shows how even they
    are, and warns of a skewed router. All ranks call this together."""
    tokens = gather_counts(session.parallel.expert_loads) if isinstance(session, Session) else {}
    if tokens and rank == 0:
        display.line(report_loads(tokens, session.plan.axes.expert))
    return {"expert_tokens": tokens} if tokens else {}
