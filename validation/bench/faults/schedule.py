"""Random kills: which rank, at which step, during what. A seed decides them, so that a benchmark can be repeated."""

import random
from dataclasses import dataclass

from validation.bench.faults.inject import Fault, kill
from validation.bench.faults.moments import PUBLISH, RESTART, START

# Parts of a run, and how often each is chosen.
_CHANCES = {"data": 1, "forward": 2, "backward": 2, "optimizer": 1, "save": 2, PUBLISH: 2, "evaluation": 2, RESTART: 2}
_FEWEST_WITH_ALL = 5  # a smaller number of kills has no place for each of the rare parts


@dataclass(frozen=True)
class PlannedKill:
    """A rank is killed at this step or a later one, during this part of the run, and at step `latest` in any case."""

    rank: int
    step: int
    during: str
    latest: int

    def fault(self, restarts: int) -> Fault:
        """The fault that kills the rank when the ranks were restarted so often."""
        return kill(self.rank).at(self.step).during(self.during).by(self.latest).after(restarts)


def plan_kills(
    seed: int, kills: int, ranks: int, steps: int, *, save_every: int | None, evaluate_every: int | None
) -> list[PlannedKill]:
    """Returns so many kills of a run of `steps` steps, in the order of their steps. Each is early enough that its part
    of the run comes again, as often as checkpoints are saved and evaluations are made. With five kills or more, the
    first is in the start, and at least one each is in a save, an evaluation and a restart. Parts that the run does not
    have at regular steps are left out."""
    chance = random.Random(seed)
    without = {*(() if save_every else ("save", PUBLISH)), *(() if evaluate_every else ("evaluation",))}
    chances = {part: weight for part, weight in _CHANCES.items() if part not in without}
    parts = chance.choices(list(chances), list(chances.values()), k=kills)
    if kills >= _FEWEST_WITH_ALL:
        rare = [part for part in ("save", "evaluation", RESTART) if part in chances]
        for place, part in zip(chance.sample(range(1, kills), len(rare)), rare, strict=True):
            parts[place] = part
        parts[0] = START
    if parts[0] == RESTART:  # nothing was killed before it
        parts[0] = "forward"
    interval = max(save_every or 1, evaluate_every or 1)
    begins = sorted(chance.randint(1, max(1, steps - interval - 1)) for _ in range(kills))
    planned = []
    for part, begin in zip(parts, begins, strict=True):
        step, latest = 0 if part in (START, RESTART) else begin, min(begin + 2 * interval, steps - 1)
        planned.append(PlannedKill(chance.randrange(ranks), step, part, latest))
    return planned
