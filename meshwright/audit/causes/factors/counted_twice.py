"""The cause `counted_twice`: the gradients of some parameters are a whole number of times the reference's, those of the
others are right."""

from meshwright.audit.causes.copies import fewest_copies
from meshwright.audit.causes.counts import data_ranks
from meshwright.audit.causes.reductions.tied import tied_names
from meshwright.audit.causes.wording import list_names, number
from meshwright.audit.evidence import SLACK, Evidence, Verdict


def counted_twice(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if exactly some gradients are multiplied by 2, by the number of ranks that hold a copy, or by a
    number of ranks; or if those that several ranks hold are divided by that number, and those that are divided over
    ranks are right."""
    names, others = evidence.differing_gradients, evidence.equal_gradients
    common = evidence.common_factor(names) if names and others else None
    if common is None:
        return None
    factor, uncertainty = common
    copies = min(fewest_copies(evidence, name) for name in names)
    of_others = max(fewest_copies(evidence, name) for name in others)
    whole = round(factor) if factor > 1 else round(1 / factor) if factor > 0 else 0
    if whole < 2 or abs((factor if factor > 1 else 1 / factor) / whole - 1) > uncertainty:
        return None
    replicated = copies > of_others and whole in (copies, copies // max(1, of_others))
    if factor < 1 and not replicated:
        return None
    if whole not in {2, copies, evidence.candidate.world_size, data_ranks(evidence.candidate, evidence.step)}:
        return None
    worst = max(evidence.scaled_misfit(name, factor) for name in names)
    if not evidence.fits(worst):
        return None
    return Verdict(
        "counted_twice",
        f"the gradients of {list_names(names)} are {number(factor)} times the reference's, those of the other"
        f" {len(others)} parameters are right; {_reason(evidence, names, whole, factor, replicated)}",
        worst / SLACK,
    )


def _reason(evidence: Evidence, names: tuple[str, ...], whole: int, factor: float, replicated: bool) -> str:
    if replicated:
        done = "added up over these ranks although each has the whole gradient" if factor > 1 else "averaged over them"
        return (
            f"they are those of which {whole} ranks hold copies, while the others are divided: they are {done}, or"
            " reduced once too often"
        )
    tied = tied_names(evidence)
    if set(names) <= tied:
        return "these weights are used in several places (tied): their gradient is added up once too often"
    if whole in (evidence.candidate.world_size, data_ranks(evidence.candidate, evidence.step)):
        return f"they are added up {whole} times, or summed over {whole} ranks where the others are averaged"
    return f"they are added up {whole} times"
