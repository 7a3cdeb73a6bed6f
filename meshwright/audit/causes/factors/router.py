"""The cause `router_loss`: what is added to the loss for a router (balance or z loss) has another factor."""

import re

from meshwright.audit.causes.wording import list_names
from meshwright.audit.evidence import Evidence, Verdict

_ROUTER = re.compile(r"(^|\.)(router|gate|gating|wg|switch)(\.|$|_)", re.IGNORECASE)
_ONLY_SEEN = 2.0  # the residual of a cause whose numbers cannot be computed from a record


def router_loss(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if the last parameter that differs is a router's and the experts beside it are right, so that
    the difference begins in the router and reaches only what lies below. Its size cannot be computed from a record, so
    any cause whose numbers fit is preferred."""
    names, others = evidence.differing_gradients, evidence.equal_gradients
    routers = [name for name in names if _ROUTER.search(name)]
    if not routers or any("expert" in name.lower() and _beside(name, routers[-1]) for name in names):
        return None
    beside = [name for name in others if "expert" in name.lower() and _beside(name, routers[-1])]
    order = {name: index for index, name in enumerate(evidence.parameter_order)}
    if not beside or any(order[name] > order[routers[-1]] for name in names if name not in routers):
        return None
    below = [name for name in names if name not in routers]
    lower = f", and {list_names(below)} below it" if below else ""
    return Verdict(
        "router_loss",
        f"the difference begins in {routers[-1]}{lower}; the experts beside it ({list_names(beside, 2)}) are right. So"
        " what is added to the loss for the router differs (a balance or z loss that is summed, averaged or scaled over"
        " ranks), or the gradient through the routing weights",
        _ONLY_SEEN,
    )


def _beside(expert: str, router: str) -> bool:
    """Whether both names belong to the same layer of experts."""
    match = _ROUTER.search(router)
    return match is not None and expert.startswith(router[: match.start() + len(match.group(1))])
