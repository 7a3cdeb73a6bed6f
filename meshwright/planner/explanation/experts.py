"""A sentence that says what dividing experts over ranks saves and costs, with even routing and at the worst."""

from meshwright.numbers.units import bytes_text
from meshwright.planner.search_result import PricedPlan
from meshwright.profile.values import ModelProfile
from meshwright.simulator.experts import expert_names, kept_bytes


def explain_experts(priced: PricedPlan, profile: ModelProfile, link: str, cost: str) -> str:
    """Returns the sentence. `link` describes the link between the ranks, `cost` says how long tokens take on it."""
    ranks, names = priced.plan.axes.expert, expert_names(profile)
    experts_bytes = sum(parameter.bytes for parameter in profile.parameters if parameter.names[0] in names)
    even, worst = priced.prediction.dispatch_bytes
    kept = kept_bytes(profile, priced.prediction.batch_per_rank)
    return (
        f"Expert {ranks}: the experts have {experts_bytes / profile.parameter_bytes:.0%} of the weights"
        f" ({bytes_text(experts_bytes)}), and each of {ranks} data ranks holds a part of them. Tokens go there over"
        f" {link}: {cost} if routing is even, as is assumed. The buffers of a layer take {bytes_text(even)} then."
        f" If all tokens went to one rank, they would take {bytes_text(worst)}, and what its experts keep for a"
        f" microbatch {bytes_text(kept * ranks)} instead of {bytes_text(kept)}."
    )
