"""`ask for JOB time|cost|devices`: the fastest, cheapest or smallest cluster of a list that trains the job within a
deadline and a budget.

    time = steps × seconds of a step of the best plan on the cluster
    cost = time × price of the cluster
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find_cluster
from meshwright.errors import InputError
from meshwright.files.yaml_file import read_mapping
from meshwright.numbers.units import duration_text, number_text
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.profiles import Profiles
from meshwright.planner.questions.answer import (
    Answer,
    InputsOn,
    PlannedPoint,
    estimates,
    inputs_on_cluster,
    plan_point,
)

Goal = Literal["time", "cost", "devices"]
GOALS: tuple[Goal, ...] = get_args(Goal)
_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}


@dataclass(frozen=True)
class Limits:
    """What a run may take: seconds, and money. None: any."""

    deadline_s: float | None = None
    budget: float | None = None


def read_duration(text: str, source: str) -> float:
    """The seconds of `3d`, `12h`, `90min` or `30s`."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*([a-z]+)", text.strip())
    if match is None or match[2] not in _SECONDS or not float(match[1]):
        raise InputError(f"{source} {text}: write a time such as 3d, 12h, 90min or 30s")
    return float(match[1]) * _SECONDS[match[2]]


def read_clusters(text: str) -> list[Cluster]:
    """The clusters of `8xH100=24,2x8xH100=48`, each with its price of an hour, or of a YAML file that maps names to
    prices, or of one file that describes a cluster. A price may be left out."""
    source = f"--clusters {text}"
    if text.endswith((".yaml", ".yml")) and "," not in text and "=" not in text:
        prices: Mapping[str, Any] = read_mapping(Path(text), "clusters")
        return priced_clusters({text: None} if "nodes" in prices else prices, source)
    words = [word.strip().partition("=") for word in text.split(",") if word.strip()]
    for number, (name, _, _) in enumerate(words):
        if name in [other for other, _, _ in words[:number]]:
            raise InputError(f"{source}: '{name}' is there twice: leave out one")
    return priced_clusters({name: price or None for name, _, price in words}, source)


def priced_clusters(prices: Mapping[str, Any], source: str) -> list[Cluster]:
    """The clusters of a mapping from names to prices of an hour, or to None. `source` is named in errors."""
    clusters = []
    for name, price in prices.items():
        cluster = find_cluster(str(name))
        if price is not None:
            cluster = cluster.model_copy(update={"price_per_hour": _price(price, str(name), source), "name": str(name)})
        clusters.append(cluster)
    if not clusters:
        raise InputError(f"{source}: there is no cluster: write names and prices of an hour, such as 8xH100=24")
    return clusters


def _price(value: Any, name: str, source: str) -> float:
    try:
        price = 0.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        price = 0.0
    if not 0 < price < 1e12:
        raise InputError(f"{source}: the price of {name} is '{value}': write a number above 0, the price of one hour")
    return price


def best_cluster(
    goal: Goal,
    clusters: Sequence[Cluster],
    steps: int,
    limits: Limits,
    inputs: PlanningInputs,
    profiles: Profiles,
    inputs_on: InputsOn | None = None,
    trained_on: str | None = None,
) -> Answer:
    """Answers which of the clusters reaches the goal in a run of so many steps. `trained_on` says what these are, such
    as `1 billion tokens`."""
    if goal not in GOALS:
        raise InputError(f"the goal is '{goal}': write time, cost or devices")
    if steps < 1:
        raise InputError(f"a run of {steps} steps trains nothing: write a number above 0")
    if goal == "cost" or limits.budget is not None:
        for cluster in clusters:
            if cluster.price_per_hour is None:
                raise InputError(
                    f"'{cluster.name}' has no price, which the goal cost and --budget need: write --clusters"
                    f" {cluster.name}=PRICE_PER_HOUR, --price with that of a device and hour, or price_per_hour in its"
                    " YAML file"
                )
    points = [
        plan_point(cluster.name, *inputs_on_cluster(cluster, inputs, profiles, inputs_on)) for cluster in clusters
    ]
    rows = [_row(point, steps, limits) for point in points]
    possible = [(point, row) for point, row in zip(points, rows, strict=True) if row["is_possible"]]
    best = min(possible, key=lambda pair: _order(goal, pair[1]), default=None)
    columns = ("cluster", "devices", "step", "whole run", "cost", "within the limits", "plan")
    table = tuple(
        (
            point.label,
            f"{point.devices:,}",
            point.cells()[0],
            duration_text(row["run_s"]),
            number_text(row["run_cost"]),
            "yes" if row["is_possible"] else row["obstacle"],
            point.cells()[3],
        )
        for point, row in zip(points, rows, strict=True)
    )
    return Answer(
        "goal",
        columns,
        table,
        (_sentence(goal, best, rows, limits, steps, trained_on), *estimates(points)),
        {"goal": goal, "steps": steps, "best": best[1] if best else None, "rows": rows},
    )


def _row(point: PlannedPoint, steps: int, limits: Limits) -> dict[str, Any]:
    values = point.values()
    if point.best is None:
        return {**values, "run_s": None, "run_cost": None, "is_possible": False, "obstacle": "no plan fits"}
    run_s = steps * point.step_s
    cost = point.cost_of(run_s)
    obstacle = ""
    if limits.deadline_s is not None and run_s > limits.deadline_s:
        obstacle = f"{duration_text(run_s - limits.deadline_s)} too long"
    elif limits.budget is not None and cost is not None and cost > limits.budget:
        obstacle = f"{number_text(cost - limits.budget)} above the budget"
    return {**values, "run_s": run_s, "run_cost": cost, "is_possible": not obstacle, "obstacle": obstacle}


def _order(goal: Goal, row: Mapping[str, Any]) -> tuple[float, ...]:
    cost = row["run_cost"] if row["run_cost"] is not None else float("inf")
    by_goal = {"time": row["run_s"], "cost": cost, "devices": row["devices"]}
    return (by_goal[goal], cost, row["run_s"])


def _sentence(
    goal: Goal,
    best: tuple[PlannedPoint, dict[str, Any]] | None,
    rows: Sequence[Mapping[str, Any]],
    limits: Limits,
    steps: int,
    trained_on: str | None,
) -> str:
    wanted = [f"within {duration_text(limits.deadline_s)}"] if limits.deadline_s is not None else []
    wanted += [f"for at most {number_text(limits.budget)}"] if limits.budget is not None else []
    words = " and ".join(wanted)
    trained = f"{steps:,} steps" if trained_on is None else f"{trained_on} ({steps:,} steps)"
    if best is None:
        planned = [row for row in rows if row["run_s"] is not None]
        fastest = min(planned, key=lambda row: row["run_s"], default=None)
        cheapest = min((row for row in planned if row["run_cost"]), key=lambda row: row["run_cost"], default=None)
        near = [f"the fastest, {fastest['cluster']}, takes {duration_text(fastest['run_s'])}"] if fastest else []
        if cheapest and limits.budget is not None:
            near.append(f"the cheapest, {cheapest['cluster']}, costs {number_text(cheapest['run_cost'])}")
        others = f": {', and '.join(near)}" if near else ", because no plan fits on any of them"
        return f"None of the {len(rows)} clusters trains {trained}{f' {words}' if words else ''}{others}."
    if len(rows) == 1:
        row, is_priced = best[1], best[1]["run_cost"] is not None
        cost = f" and costs {number_text(row['run_cost'])}" if is_priced else ""
        return (
            f"Training {trained} on {row['cluster']} takes {duration_text(row['run_s'])}{cost}, with {row['summary']}."
        )
    superlative = {"time": "fastest", "cost": "cheapest", "devices": "smallest"}[goal]
    row = best[1]
    price = f" and costs {number_text(row['run_cost'])}" if row["run_cost"] is not None else ""
    return (
        f"The {superlative} cluster that trains {trained}{f' {words}' if words else ''} is {row['cluster']}: it"
        f" takes {duration_text(row['run_s'])}{price}, with {row['summary']}."
    )
