"""Prices of collectives by the simulator, compared with published measurements.

`python -m validation.collectives.published` prices every row of published.json whose hardware the catalog can
describe, and prints the errors by source. What a source gave to the catalog is removed before its own rows are
priced: its curves, its latencies (NCCL's replace them), and its rows from the fit of the link efficiencies.

    error        = |priced / measured - 1|, its median and 90th percentile over rows          summary
    priced       = collective_price(...), and the host's launch where torch timed one call    predict
    efficiencies = those with the least |log(priced / measured)|, groups weighted by √rows    fit
    datasheet    = latency × messages + sent bytes / bandwidth: the guess to be better than   datasheet_s

`--fit` prints the efficiencies fitted to all rows, for catalog/link_efficiency.yaml; `--json` ends in one line of JSON.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log, sqrt
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from meshwright.cluster.catalog import find_link
from meshwright.cluster.cluster import Cluster, Collective, Link
from meshwright.cluster.names import cluster_from_name
from meshwright.plan_fields.groups import Axes
from meshwright.simulator.communication.collectives import (
    Algorithm,
    LinkEfficiencies,
    collective_launch_s,
    collective_price,
    link_efficiencies,
    sent_share,
)
from meshwright.simulator.communication.placement import RankGroup, group_of_axes

ROWS = Path(__file__).with_name("published.json")
# Where a fit begins, and stays for families without rows: the constants of NCCL's tuner (src/graph/tuning.cc).
PRIORS = {
    "nvlink_switch": {
        "ring_share": 0.8,
        "few_ranks_loss": 0.0,
        "hop_share": 0.115,
        "softness": 1.0,
        "multicast_share": 0.8,
    },
    "nvlink_mesh": {"ring_share": 0.8, "hop_share": 0.115, "softness": 1.0},
    "network": {"ring_share": 0.96, "hop_share": 0.43, "softness": 1.0},
    "tcp": {"rank_limit_bytes_per_s": 5e9},
}
BOUNDS = {
    "ring_share": (0.2, 0.96),
    "few_ranks_loss": (0.0, 0.6),
    "hop_share": (0.02, 4.0),
    "softness": (0.4, 1.0),
    "multicast_share": (0.4, 0.96),
    "rank_limit_bytes_per_s": (1e8, 1e11),
}
# The link whose latency replaces one that came from the source that is left out.
SUBSTITUTE_LINKS = {"NVLink": "NVLink3", "EFA": "InfiniBand-NDR", "Ethernet": "InfiniBand-NDR"}
STEP_FACTORS = (1.5, 1.15, 1.04)


@dataclass(frozen=True)
class CollectiveCase:
    """One published row."""

    id: str
    group_name: str
    source: str
    kind: Collective
    size_bytes: int
    seconds: float
    group: RankGroup
    cluster: Cluster
    through_torch: bool
    algorithm: Algorithm | None


@dataclass(frozen=True)
class ScoredCase:
    """A case with its price, and with the guess of a datasheet."""

    case: CollectiveCase
    priced_s: float
    datasheet_s: float

    @property
    def error(self) -> float:
        return abs(self.priced_s / self.case.seconds - 1)

    @property
    def datasheet_error(self) -> float:
        return abs(self.datasheet_s / self.case.seconds - 1)


@lru_cache
def _series() -> list[dict[str, Any]]:
    return list(json.loads(ROWS.read_text())["series"])


def cases() -> list[CollectiveCase]:
    """The published rows whose hardware the catalog can describe."""
    return [case for raw in _series() if "cluster" in raw for case in _cases(raw)]


def not_covered() -> list[dict[str, Any]]:
    return [
        {"group": raw["group"], "ids": [row[0] for row in raw["rows"]], "reason": raw["not_covered"]}
        for raw in _series()
        if "not_covered" in raw
    ]


def _cases(raw: dict[str, Any]) -> list[CollectiveCase]:
    cluster = cluster_from_name(raw["cluster"])
    placed = group_of_axes(Axes(replicate=raw["ranks"]), ("replicate",), cluster)
    assert placed.nodes == raw["nodes"], raw
    return [
        CollectiveCase(
            id=name,
            group_name=raw["group"],
            source=raw["source"],
            kind=raw["collective"],
            size_bytes=size,
            seconds=seconds,
            group=placed,
            cluster=cluster,
            through_torch=raw["timed_with"] == "torch",
            algorithm=raw.get("algorithm"),
        )
        for name, size, seconds in raw["rows"]
    ]


def predict(case: CollectiveCase, cluster: Cluster, efficiencies: LinkEfficiencies) -> float:
    """The predicted seconds of a case. Curves of its own source, where the catalog has them, include the host's
    launch."""
    price = collective_price(case.kind, case.size_bytes, case.group, cluster, case.algorithm, efficiencies)
    link = cluster.link if case.group.nodes > 1 else cluster.nodes[0].link
    sources = [curve.source for curve in link.curves.get(case.kind, ())] if link else []
    from_own_curve = price.algorithm == "curve" and any(case.source in source for source in sources)
    return price.seconds + (collective_launch_s(cluster) if case.through_torch and not from_own_curve else 0.0)


def datasheet_s(case: CollectiveCase, cluster: Cluster) -> float:
    """Seconds of a ring at the full speed of the datasheet."""
    node = cluster.nodes[0]
    sent_bytes = sent_share(case.kind, case.group.ranks) * case.size_bytes
    messages = (2 if case.kind == "all_reduce" else 1) * (case.group.ranks - 1)
    if case.group.nodes == 1:
        return messages * node.link.latency_s + sent_bytes / node.link.bandwidth_bytes_per_s
    assert cluster.link is not None
    return messages * cluster.link.latency_s + sent_bytes / (
        case.group.min_per_node * cluster.link.bandwidth_bytes_per_s
    )


def without_source(cluster: Cluster, source: str | None, curves: bool = True) -> Cluster:
    """The cluster as the catalog would describe it without a source, and without any curves unless `curves`."""
    nodes = tuple(
        node.model_copy(update={"link": _link_without_source(node.link, source, curves)}) for node in cluster.nodes
    )
    link = cluster.link and _link_without_source(cluster.link, source, curves)
    return cluster.model_copy(update={"nodes": nodes, "link": link})


def _link_without_source(link: Link, source: str | None, curves: bool) -> Link:
    remaining_curves = {
        kind: tuple(curve for curve in measured if curves and not (source and source in curve.source))
        for kind, measured in link.curves.items()
    }
    latency_s = link.latency_s
    if source and source in link.sources["latency_s"]:
        latency_s = next(
            find_link(other).latency_s for prefix, other in SUBSTITUTE_LINKS.items() if link.name.startswith(prefix)
        )
    return link.model_copy(update={"curves": remaining_curves, "latency_s": latency_s})


def fit(rows: Sequence[CollectiveCase], clusters: dict[str, Cluster]) -> LinkEfficiencies:
    """The efficiencies of a coordinate descent from the priors, one family after another, in shrinking steps."""
    efficiencies = link_efficiencies()
    for family, values in PRIORS.items():
        efficiencies = _with_values(efficiencies, family, values)
    for factor in STEP_FACTORS:
        for _ in range(3):
            for family, values in PRIORS.items():
                family_rows = [case for case in rows if family in _families(clusters[case.cluster.name], case.group)]
                for name in values if family_rows else ():
                    efficiencies = _improve(efficiencies, family, name, factor, family_rows, clusters)
    return efficiencies


def _improve(
    efficiencies: LinkEfficiencies,
    family: str,
    name: str,
    factor: float,
    rows: Sequence[CollectiveCase],
    clusters: dict[str, Cluster],
) -> LinkEfficiencies:
    current, (low, high) = getattr(efficiencies.families[family], name), BOUNDS[name]
    candidates = [current * factor**power for power in (-2, -1, 0, 1, 2)] if current else [0.0, 0.1, 0.2, 0.4]
    options = [_with_values(efficiencies, family, {name: round(min(high, max(low, value)), 4)}) for value in candidates]
    return min([efficiencies, *options], key=lambda option: _fit_error(option, rows, clusters))


def _with_values(efficiencies: LinkEfficiencies, family: str, values: dict[str, float]) -> LinkEfficiencies:
    changed = efficiencies.families[family].model_copy(update=values)
    return efficiencies.model_copy(update={"families": {**efficiencies.families, family: changed}})


def _families(cluster: Cluster, group: RankGroup) -> set[str]:
    """The families of the links that a group uses."""
    families = {link_efficiencies().family(cluster.nodes[0].link)} if group.per_node > 1 else set()
    between = group.nodes > 1 and cluster.link
    return families | ({link_efficiencies().family(between)} if between else set())


def _fit_error(efficiencies: LinkEfficiencies, rows: Sequence[CollectiveCase], clusters: dict[str, Cluster]) -> float:
    by_group: dict[str, list[float]] = {}
    for case in rows:
        ratio = predict(case, clusters[case.cluster.name], efficiencies) / case.seconds
        by_group.setdefault(case.group_name, []).append(abs(log(ratio)))
    weights = {name: sqrt(len(errors)) for name, errors in by_group.items()}
    return sum(weights[name] * mean(errors) for name, errors in by_group.items()) / sum(weights.values())


def fit_without_source(source: str | None, rows: Iterable[CollectiveCase]) -> LinkEfficiencies:
    """The efficiencies fitted to the rows of all other sources, priced without curves."""
    used = [case for case in rows if case.source != source]
    clusters = {case.cluster.name: without_source(case.cluster, source, curves=False) for case in used}
    return fit(used, clusters)


def score_left_out() -> list[ScoredCase]:
    """Every case, priced by a catalog without its source."""
    rows = cases()
    scored: list[ScoredCase] = []
    for source in dict.fromkeys(case.source for case in rows):
        efficiencies = fit_without_source(source, rows)
        for case in (case for case in rows if case.source == source):
            cluster = without_source(case.cluster, source)
            scored.append(ScoredCase(case, predict(case, cluster, efficiencies), datasheet_s(case, cluster)))
    return scored


def score_as_shipped() -> list[ScoredCase]:
    """Every case, priced by the catalog as it is, which many of the rows went into."""
    return [
        ScoredCase(case, predict(case, case.cluster, link_efficiencies()), datasheet_s(case, case.cluster))
        for case in cases()
    ]


def summary(scored: Sequence[ScoredCase]) -> dict[str, float]:
    errors = [case.error for case in scored]
    return {
        "rows": len(errors),
        "median": median(errors),
        "p90": quantiles(errors, n=10, method="inclusive")[-1] if len(errors) > 1 else errors[0],
        "datasheet_median": median(case.datasheet_error for case in scored),
    }


def by_group(scored: Sequence[ScoredCase]) -> dict[str, list[ScoredCase]]:
    groups: dict[str, list[ScoredCase]] = {}
    for scored_case in scored:
        groups.setdefault(scored_case.case.group_name, []).append(scored_case)
    return groups


def main() -> None:
    if "--fit" in sys.argv:
        efficiencies = fit_without_source(None, cases())
        for family, values in PRIORS.items():
            print(family, {name: getattr(efficiencies.families[family], name) for name in values})
        return
    scored, shipped = score_left_out(), by_group(score_as_shipped())
    rows = [{"group": name, **summary(cases), "as_shipped_median": summary(shipped[name])["median"]}
            for name, cases in by_group(scored).items()]  # fmt: skip
    print(f"{'group':24}{'rows':>6}{'median':>9}{'p90':>9}{'datasheet':>11}{'as shipped':>12}")
    for row in [*rows, {"group": "all covered rows", **summary(scored), "as_shipped_median": _shipped(shipped)}]:
        shown = [row["median"], row["p90"], row["datasheet_median"], row["as_shipped_median"]]
        print(
            f"{row['group']:24}{row['rows']:6}"
            + "".join(f"{value:{width}.1%}" for value, width in zip(shown, (9, 9, 11, 12), strict=True))
        )
    for group in not_covered():
        print(f"not covered: {len(group['ids'])} rows of {group['group']} ({group['ids'][0]} …): {group['reason']}")
    if "--json" in sys.argv:
        print(json.dumps({"rows": rows, "summary": summary(scored), "not_covered": not_covered()}))


def _shipped(groups: dict[str, list[ScoredCase]]) -> float:
    return summary([case for cases in groups.values() for case in cases])["median"]


if __name__ == "__main__":
    main()
