"""Says why a plan divides sequences over the context axis."""

from meshwright.planner.model_summary import ModelSummary
from meshwright.planner.search_result import PricedPlan

_GIB = 2**30


def sequences(best: PricedPlan, summary: ModelSummary) -> list[str]:
    """Says what the activations of whole sequences would need, and what exchanging keys and values costs; empty without
    a context axis."""
    ranks, length, prediction = best.plan.axes.context, summary.sequence_length, best.prediction
    if ranks == 1:
        return []
    saved = prediction.memory.breakdown["activations"] * ranks / _GIB
    exchange_s = prediction.breakdown.get("context", 0.0)
    way = "A ring of" if best.plan.modules.attention_exchange == "ring" else "All-gathers of"
    return [
        f"Context {ranks}: activations of {length:,} tokens need {saved:,.1f} GiB on one device, so each rank has"
        f" {length // ranks:,} tokens. {way} keys and values adds {exchange_s / prediction.step_s:.1%} to the step."
    ]
