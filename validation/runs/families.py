"""Families of published runs that differ only in their plan: the predictor must rank the plans of a family."""

import json
from collections import defaultdict
from collections.abc import Iterable

from meshwright.user.call import Call
from validation.runs.case import PublishedCase


def family_of(source: str, engine: str, model: Call, cluster: str, precision: str, global_batch: int) -> str:
    """The name of the family: equal for runs of the same model in the same precision on the same ranks of the same
    cluster with the same global batch.

    `engine` separates runs that were measured differently: with another program, compiled or not, or as another
    percentile of the step times."""
    name = model.call.rpartition(":")[2].rpartition(".")[2]
    keywords = json.dumps(model.arguments, sort_keys=True, separators=(",", ":"))
    return f"{source} ({engine}) {name}{keywords} {cluster} {precision} {global_batch}"


def families(cases: Iterable[PublishedCase]) -> dict[str, tuple[PublishedCase, ...]]:
    """The measured cases of each family in which at least two plans differ."""
    cases_by_family: dict[str, list[PublishedCase]] = defaultdict(list)
    for case in cases:
        if case.step_s is not None:
            cases_by_family[case.family].append(case)
    return {
        family: tuple(members)
        for family, members in cases_by_family.items()
        if any(case.plan != members[0].plan for case in members)
    }
