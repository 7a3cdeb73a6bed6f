"""Plants each fault and counts how many programs it takes to find it."""

from collections.abc import Callable, Collection

from validation.fuzz.draw import draw_case
from validation.fuzz.plans import PLANS
from validation.fuzz.training.faults import FAULTS
from validation.fuzz.training.outcome import Pools, outcome_of

MOST_PROGRAMS = 500


def programs_until_found(name: str, seed: int, pools: Pools, most: int = MOST_PROGRAMS) -> int | None:
    """How many programs were run until one was not equal with the fault, and equal without it; None if none of
    `most` was. Only plans that the fault can affect are drawn."""
    plans = [plan for plan in PLANS if plan.startswith(FAULTS[name].plans)]
    count = 0
    for number in range(2 * most):
        case = draw_case(seed, number, 0, plans)
        outcome = outcome_of(case, pools, name)
        if outcome.kind == "invalid":
            continue
        count += 1
        if outcome.kind != "equal" and outcome_of(case, pools).kind == "equal":
            return count
        if count == most:
            return None
    return None


def search_faults(names: Collection[str], seed: int, report: Callable[[str], None]) -> dict[str, int | None]:
    """Searches for each of the faults, and reports a line about each."""
    pools, found = Pools(), dict[str, int | None]()
    try:
        for name in names or FAULTS:
            found[name] = programs_until_found(name, seed, pools)
            report(f"{name}: {f'found after {found[name]} programs' if found[name] else 'not found'}")
    finally:
        pools.close()
    return found
