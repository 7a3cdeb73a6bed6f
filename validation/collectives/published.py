"""Collectives as priced by the simulator against published measurements of them.

`python -m validation.collectives.published` prices every row of published.json that the catalog can
describe, and prints the errors by source. Whatever a source gave to the catalog is taken away before its own rows are
priced: its curves, its latencies (NCCL's take their place), and its rows from the fit of the shares reached.

    error     = |priced / measured - 1|, its median and 90th percentile over rows             summary
    priced    = price(...), and the host's call where torch timed one call at a time          predict
    shares    = those with the least |log(priced / measured)|, groups weighed by √rows        fit
    datasheet = latency × messages + wire bytes / bandwidth: the guess to be better than      datasheet

`--fit` prints the shares fitted to all rows, for catalog/links_reached.yaml; `--json` ends in one line of JSON.
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
from meshwright.cluster.names import named
from meshwright.plan import Axes
from meshwright.simulator.communication.collectives import Algorithm, Reached, call_s, price, reached, wire_share
from meshwright.simulator.communication.placement import Group, group

ROWS = Path(__file__).with_name("published.json")
# Where a fit begins, and stays for families without rows: what NCCL's own tuner takes for granted.
PRIORS = {
    "nvlink_switch": {"ring": 0.8, "few": 0.0, "hop": 0.115, "softness": 1.0, "multicast": 0.8},
    "nvlink_mesh": {"ring": 0.8, "hop": 0.115, "softness": 1.0},
    "network": {"ring": 0.96, "hop": 0.43, "softness": 1.0},
    "tcp": {"most": 5e9},
}
BOUNDS = {
    "ring": (0.2, 0.96),
    "few": (0.0, 0.6),
    "hop": (0.02, 4.0),
    "softness": (0.4, 1.0),
    "multicast": (0.4, 0.96),
    "most": (1e8, 1e11),
}
# Whose latency stands in for one that came from the source that is left out.
STAND_INS = {"NVLink": "NVLink3", "EFA": "InfiniBand-NDR", "Ethernet": "InfiniBand-NDR"}
FACTORS = (1.5, 1.15, 1.04)


@dataclass(frozen=True)
class Case:
    """One published row."""

    id: str
    group_name: str
    source: str
    kind: Collective
    size_bytes: int
    seconds: float
    group: Group
    cluster: Cluster
    through_torch: bool
    algorithm: Algorithm | None


@dataclass(frozen=True)
class Scored:
    case: Case
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


def cases() -> list[Case]:
    """The rows whose hardware the catalog knows."""
    return [case for raw in _series() if "cluster" in raw for case in _cases(raw)]


def not_covered() -> list[dict[str, Any]]:
    return [
        {"group": raw["group"], "ids": [row[0] for row in raw["rows"]], "reason": raw["not_covered"]}
        for raw in _series()
        if "not_covered" in raw
    ]


def _cases(raw: dict[str, Any]) -> list[Case]:
    cluster = named(raw["cluster"])
    placed = group(Axes(replicate=raw["ranks"]), ("replicate",), cluster)
    assert placed.nodes == raw["nodes"], raw
    return [
        Case(
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


def predict(case: Case, cluster: Cluster, shares: Reached) -> float:
    """The source's own curves, where the catalog has them, already hold the host's call."""
    told = price(case.kind, case.size_bytes, case.group, cluster, case.algorithm, shares)
    link = cluster.link if case.group.nodes > 1 else cluster.nodes[0].link
    sources = [curve.source for curve in link.curves.get(case.kind, ())] if link else []
    by_itself = told.algorithm == "curve" and any(case.source in source for source in sources)
    return told.seconds + (call_s(cluster) if case.through_torch and not by_itself else 0.0)


def datasheet(case: Case, cluster: Cluster) -> float:
    """A ring at full speed."""
    node = cluster.nodes[0]
    wire = wire_share(case.kind, case.group.ranks) * case.size_bytes
    messages = (2 if case.kind == "all_reduce" else 1) * (case.group.ranks - 1)
    if case.group.nodes == 1:
        return messages * node.link.latency_s + wire / node.link.bandwidth_bytes_per_s
    assert cluster.link is not None
    return messages * cluster.link.latency_s + wire / (case.group.fewest * cluster.link.bandwidth_bytes_per_s)


def without(cluster: Cluster, source: str | None, curves: bool = True) -> Cluster:
    """The cluster as the catalog would have it without a source, and without any curves if so asked."""
    nodes = tuple(node.model_copy(update={"link": _without(node.link, source, curves)}) for node in cluster.nodes)
    link = cluster.link and _without(cluster.link, source, curves)
    return cluster.model_copy(update={"nodes": nodes, "link": link})


def _without(link: Link, source: str | None, curves: bool) -> Link:
    kept = {
        kind: tuple(curve for curve in found if curves and not (source and source in curve.source))
        for kind, found in link.curves.items()
    }
    latency_s = link.latency_s
    if source and source in link.sources["latency_s"]:
        latency_s = next(find_link(other).latency_s for word, other in STAND_INS.items() if link.name.startswith(word))
    return link.model_copy(update={"curves": kept, "latency_s": latency_s})


def fit(rows: Sequence[Case], clusters: dict[str, Cluster]) -> Reached:
    """Coordinate descent from the priors, one family after another, in shrinking steps."""
    shares = reached()
    for family, values in PRIORS.items():
        shares = _with(shares, family, values)
    for factor in FACTORS:
        for _ in range(3):
            for family, values in PRIORS.items():
                mine = [case for case in rows if family in _families(clusters[case.cluster.name], case.group)]
                for name in values if mine else ():
                    shares = _better(shares, family, name, factor, mine, clusters)
    return shares


def _better(
    shares: Reached, family: str, name: str, factor: float, rows: Sequence[Case], clusters: dict[str, Cluster]
) -> Reached:
    now, (low, high) = getattr(shares.families[family], name), BOUNDS[name]
    seeds = [now * factor**power for power in (-2, -1, 0, 1, 2)] if now else [0.0, 0.1, 0.2, 0.4]
    options = [_with(shares, family, {name: round(min(high, max(low, value)), 4)}) for value in seeds]
    return min([shares, *options], key=lambda option: _loss(option, rows, clusters))


def _with(shares: Reached, family: str, values: dict[str, float]) -> Reached:
    changed = shares.families[family].model_copy(update=values)
    return shares.model_copy(update={"families": {**shares.families, family: changed}})


def _families(cluster: Cluster, placed: Group) -> set[str]:
    found = {reached().family(cluster.nodes[0].link)} if placed.per_node > 1 else set()
    return found | ({reached().family(cluster.link)} if placed.nodes > 1 and cluster.link else set())


def _loss(shares: Reached, rows: Sequence[Case], clusters: dict[str, Cluster]) -> float:
    by_group: dict[str, list[float]] = {}
    for case in rows:
        ratio = predict(case, clusters[case.cluster.name], shares) / case.seconds
        by_group.setdefault(case.group_name, []).append(abs(log(ratio)))
    weights = {name: sqrt(len(errors)) for name, errors in by_group.items()}
    return sum(weights[name] * mean(errors) for name, errors in by_group.items()) / sum(weights.values())


def fit_without(source: str | None, rows: Iterable[Case]) -> Reached:
    """The shares fitted to the rows of all other sources, priced without curves."""
    used = [case for case in rows if case.source != source]
    clusters = {case.cluster.name: without(case.cluster, source, curves=False) for case in used}
    return fit(used, clusters)


def score_left_out() -> list[Scored]:
    """Every case, priced by a catalog that has not seen its source."""
    rows = cases()
    scored: list[Scored] = []
    for source in dict.fromkeys(case.source for case in rows):
        shares = fit_without(source, rows)
        for case in (case for case in rows if case.source == source):
            cluster = without(case.cluster, source)
            scored.append(Scored(case, predict(case, cluster, shares), datasheet(case, cluster)))
    return scored


def score_as_shipped() -> list[Scored]:
    """Every case by the catalog as it is, which has seen many of them."""
    return [Scored(case, predict(case, case.cluster, reached()), datasheet(case, case.cluster)) for case in cases()]


def summary(scored: Sequence[Scored]) -> dict[str, float]:
    errors = [one.error for one in scored]
    return {
        "rows": len(errors),
        "median": median(errors),
        "p90": quantiles(errors, n=10, method="inclusive")[-1] if len(errors) > 1 else errors[0],
        "datasheet_median": median(one.datasheet_error for one in scored),
    }


def by_group(scored: Sequence[Scored]) -> dict[str, list[Scored]]:
    found: dict[str, list[Scored]] = {}
    for one in scored:
        found.setdefault(one.case.group_name, []).append(one)
    return found


def main() -> None:
    if "--fit" in sys.argv:
        shares = fit_without(None, cases())
        for family, values in PRIORS.items():
            print(family, {name: getattr(shares.families[family], name) for name in values})
        return
    scored, shipped = score_left_out(), by_group(score_as_shipped())
    rows = [{"group": name, **summary(found), "as_shipped_median": summary(shipped[name])["median"]}
            for name, found in by_group(scored).items()]  # fmt: skip
    print(f"{'group':24}{'rows':>6}{'median':>9}{'p90':>9}{'datasheet':>11}{'as shipped':>12}")
    for row in [*rows, {"group": "all covered rows", **summary(scored), "as_shipped_median": _shipped(shipped)}]:
        shown = [row["median"], row["p90"], row["datasheet_median"], row["as_shipped_median"]]
        print(
            f"{row['group']:24}{row['rows']:6}"
            + "".join(f"{value:{width}.1%}" for value, width in zip(shown, (9, 9, 11, 12), strict=True))
        )
    for left in not_covered():
        print(f"not covered: {len(left['ids'])} rows of {left['group']} ({left['ids'][0]} …): {left['reason']}")
    if "--json" in sys.argv:
        print(json.dumps({"rows": rows, "summary": summary(scored), "not_covered": not_covered()}))


def _shipped(groups: dict[str, list[Scored]]) -> float:
    return summary([one for found in groups.values() for one in found])["median"]


if __name__ == "__main__":
    main()
