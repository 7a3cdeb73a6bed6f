"""Builds the schedule that a plan names."""

from collections.abc import Callable, Sequence

from meshwright.collectives.schedules.halving_doubling import halving_doubling
from meshwright.collectives.schedules.ring import ring
from meshwright.collectives.schedules.schedule import Schedule
from meshwright.collectives.schedules.tree import double_tree
from meshwright.collectives.schedules.two_level import two_level
from meshwright.errors import InputError, did_you_mean

_FLAT: dict[str, Callable[[int], Schedule]] = {
    "ring": ring,
    "tree": double_tree,
    "halving_doubling": halving_doubling,
}
SCHEDULES = (*_FLAT, "two_level")


def build(name: str, ranks: int, nodes: Sequence[int]) -> Schedule:
    """Returns the schedule called `name` for `ranks` ranks. `nodes` has the number of ranks of each node, in the order
    of the ranks; only `two_level` uses it."""
    if name not in SCHEDULES:
        raise InputError(f"there is no schedule '{name}'{did_you_mean(name, SCHEDULES)}")
    if name != "two_level":
        return _FLAT[name](ranks)
    if sum(nodes) != ranks:
        raise InputError(f"nodes of {list(nodes)} ranks have {sum(nodes)} ranks, but {ranks} combine their gradients")
    return two_level(nodes)
