"""Rows that differ only in their plan: what a predictor must rank."""

import json
from collections import defaultdict
from collections.abc import Iterable

from meshwright.call import Call
from validation.runs.case import Case


def family_of(source: str, engine: str, model: Call, cluster: str, precision: str, global_batch: int) -> str:
    """The same model in the same precision on the same ranks of the same cluster, and the same global batch.

    `engine` keeps apart what is measured in another way: by another program, compiled or not, another percentile."""
    name = model.call.rpartition(":")[2].rpartition(".")[2]
    keywords = json.dumps(model.arguments, sort_keys=True, separators=(",", ":"))
    return f"{source} ({engine}) {name}{keywords} {cluster} {precision} {global_batch}"


def families(cases: Iterable[Case]) -> dict[str, tuple[Case, ...]]:
    """Those in which at least two measured plans differ."""
    members: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        if case.step_s is not None:
            members[case.family].append(case)
    return {name: tuple(found) for name, found in members.items() if any(c.plan != found[0].plan for c in found)}
