"""What a run logs and its end says about the loads of experts that are divided over ranks."""

from dataclasses import asdict
from typing import Any

from meshwright.parallel.expert.loads import gather_counts, largest_skew, rank_loads, relative_loads, report_loads
from meshwright.train.output.progress import Display
from meshwright.train.session import Session
from meshwright.train.step_runner import StepRunner


def expert_metrics(session: StepRunner) -> dict[str, float]:
    """Returns metrics of the steps since the last call: how many times its even share the most used expert of any layer
    got, and the busiest rank; empty if no experts are divided. All ranks call this together."""
    loads = session.parallel.expert_loads if isinstance(session, Session) else None
    if loads is None:
        return {}
    counts = loads.since_log(gather_counts(loads))
    return {
        "expert_load": max((max(relative_loads(of_layer)) for of_layer in counts.values()), default=0.0),
        "expert_rank_load": max((max(rank_loads(of_layer, loads.ranks)) for of_layer in counts.values()), default=0.0),
    }


def expert_result(session: StepRunner, display: Display, rank: int) -> dict[str, Any]:
    """Returns what result.json has of it: the tokens of each expert by layer and the largest skew, or nothing. Rank 0
    shows how even they are, and warns of a skewed router. All ranks call this together."""
    tokens = gather_counts(session.parallel.expert_loads) if isinstance(session, Session) else {}
    if not tokens:
        return {}
    ranks = session.plan.axes.expert
    if rank == 0:
        display.line(report_loads(tokens, ranks))
    skew = largest_skew(tokens, ranks)
    return {"expert_tokens": tokens, "expert_skew": None if skew is None else asdict(skew)}
