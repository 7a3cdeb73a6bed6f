"""`match_names`: which name of a candidate's tensor is which name of the reference's.

The same name wins. Otherwise names are compared from their end, because a model is often an attribute of another one:
`net.layers.0.weight` of a LightningModule is `layers.0.weight` of a plain script. One prefix that is added or removed
must explain all names of a group; shapes must agree, unless the candidate holds a part of a tensor that is divided by
hand."""

from collections import Counter
from collections.abc import Mapping

Shapes = Mapping[str, tuple[int, ...]]


def match_names(candidate: Shapes, reference: Shapes) -> dict[str, str]:
    """Returns the reference's name for each name of the candidate that has a counterpart."""
    matched = {name: name for name in candidate if name in reference}
    for _ in range(len(candidate)):
        left = [name for name in candidate if name not in matched]
        free = [name for name in reference if name not in matched.values()]
        change = _best_prefixes(left, free, candidate, reference)
        if change is None:
            break
        removed, added = change
        for name in left:
            other = added + name[len(removed) :]
            if name.startswith(removed) and other in free and fits(candidate[name], reference[other]):
                matched[name] = other
    return matched


def _best_prefixes(left: list[str], free: list[str], candidate: Shapes, reference: Shapes) -> tuple[str, str] | None:
    """The pair (removed, added) of prefixes that explains most names; None if none is explained."""
    by_end: dict[str, list[str]] = {}
    for name in free:
        by_end.setdefault(_end(name), []).append(name)
    votes: Counter[tuple[str, str]] = Counter()
    for name in left:
        for other in by_end.get(_end(name), ()):
            if fits(candidate[name], reference[other]):
                votes[_differing_prefixes(name, other)] += 1
    if not votes:
        return None
    return min(votes, key=lambda pair: (-votes[pair], len(pair[0]) + len(pair[1]), pair))


def _end(name: str) -> str:
    return ".".join(name.split(".")[-2:]) if "." in name else name


def _differing_prefixes(name: str, other: str) -> tuple[str, str]:
    """What stands before the longest common end of two names, cut at a dot."""
    own, theirs = name.split("."), other.split(".")
    common = 0
    while common < min(len(own), len(theirs)) and own[-1 - common] == theirs[-1 - common]:
        common += 1
    removed, added = own[: len(own) - common], theirs[: len(theirs) - common]
    return "".join(f"{part}." for part in removed), "".join(f"{part}." for part in added)


def fits(part: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether a tensor is as large as a whole one, or smaller in one dimension by a whole factor."""
    if len(part) != len(whole):
        return False
    smaller = [dim for dim in range(len(whole)) if part[dim] != whole[dim]]
    return not smaller or (len(smaller) == 1 and part[smaller[0]] > 0 and whole[smaller[0]] % part[smaller[0]] == 0)
