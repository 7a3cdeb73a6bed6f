"""The cause `expert_gradients`: the gradients of experts, of which fewer ranks hold copies than of other parameters,
are divided once too often by a number of ranks, or once too few."""

from meshwright.audit.causes.copies import fewest_copies
from meshwright.audit.causes.counts import counts_of, recognize
from meshwright.audit.causes.wording import list_names, number
from meshwright.audit.evidence import SLACK, Evidence, Verdict


def expert_gradients(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if exactly parameters that fewer ranks hold than any other are multiplied or divided by a
    number of ranks. If all others are divided over ranks as well, their names must say that they are experts."""
    names, others = evidence.differing_gradients, evidence.equal_gradients
    common = evidence.common_factor(names) if names and others else None
    if common is None or evidence.candidate.world_size < 2:
        return None
    copies = max(fewest_copies(evidence, name) for name in names)
    of_others = min(fewest_copies(evidence, name) for name in others)
    named = all("expert" in name.lower() for name in names)
    if not (copies < of_others or named) or any("expert" in name.lower() for name in others):
        return None
    factor, uncertainty = common
    counts = [count for count in counts_of(evidence, names) if "ranks" in count.text]
    known = recognize(factor, uncertainty, counts)
    worst = max(evidence.scaled_misfit(name, factor) for name in names)
    if known is None or not evidence.fits(worst):
        return None
    held = f"{copies} rank holds" if copies == 1 else f"{copies} ranks hold"
    often = (
        "they are averaged over ranks that do not hold them, once too often"
        if factor < 1
        else "they are summed over the ranks whose samples reach them, where the others are averaged"
    )
    return Verdict(
        "expert_gradients",
        f"the gradients of {list_names(names)} are {number(factor)} times the reference's ({known}); of these {held}"
        f" each part, of the others, which are right, at least {of_others}: {often}",
        worst / SLACK,
    )
