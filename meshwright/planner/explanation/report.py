"""`PlanReport`: the output of `meshwright plan`, as JSON for scripts, or as a table and sentences for people."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.planner.explanation.choice import describe_choice
from meshwright.planner.explanation.explain import explain, gib, reason, seconds, step_shares, too_large
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.profiles import Profiles
from meshwright.planner.search_result import SearchResult
from meshwright.simulator.predict import Prediction, predict_plan


@dataclass(frozen=True)
class PlanReport:
    """The result of a search, or of one given plan: the best plans with their predictions (the fastest first),
    sentences about the best plan, and rejected plans with the reasons. `candidate_count` is the number of plans that
    were considered. `choice` is the line about the best plan at the top (choice.py), empty for a given plan."""

    ranked: tuple[tuple[Plan, Prediction], ...]
    explanation: tuple[str, ...]
    rejected: tuple[tuple[Plan, str], ...]
    candidate_count: int
    choice: str = ""

    def to_dict(self) -> dict[str, Any]:
        ranked = [_entry(plan, prediction) for plan, prediction in self.ranked]
        return {
            "choice": self.choice,
            "best": ranked[0],
            "ranked": ranked,
            "explanation": " ".join(self.explanation),
            "rejected": [{"plan": _plan_dict(plan), "reason": words} for plan, words in self.rejected],
            "candidates": self.candidate_count,
        }


def report_search(result: SearchResult, inputs: PlanningInputs, profiles: Profiles) -> PlanReport:
    """Returns the report of a search. Rejected are the best plans of families that are not ranked, and plans that need
    too much memory."""
    best = result.ranked[0]
    ranked = {priced.candidate for priced in result.ranked}
    rejected = [
        (priced.plan, reason(priced, best, inputs))
        for priced in sorted(result.family_bests, key=lambda priced: priced.prediction.step_s)
        if priced.candidate not in ranked
    ]
    rejected += [(plan.plan, too_large(plan.needed_bytes, inputs, at_least=True)) for plan in result.excluded]
    return PlanReport(
        tuple((priced.plan, priced.prediction) for priced in result.ranked),
        (*explain(result, inputs), _basis(inputs, profiles)),
        tuple(rejected),
        result.candidate_count,
        describe_choice(result, inputs, profiles),
    )


def predict_given_plan(plan: Plan, inputs: PlanningInputs, profiles: Profiles) -> PlanReport:
    """Returns the report of one plan that the user gave, without a search. Raises an `InputError` if the plan does not
    suit the number of devices."""
    cluster, devices = inputs.cluster, inputs.cluster.device_count
    is_small_batch = plan.world_size < devices and inputs.global_batch < devices
    if plan.world_size != devices and not is_small_batch:
        raise InputError(
            f"the plan ({plan.summary()}) is for {plan.world_size} ranks, but the cluster '{cluster.name}' has"
            f" {devices} devices: choose axes whose product is {devices}, or another cluster"
        )
    profile = profiles.get(plan.numerics.precision, plan.memory.recompute)
    prediction = predict_plan(cluster, profile, plan, inputs.global_batch, inputs.optimizer)
    sentences = [
        f"{plan.summary()} trains {inputs.global_batch} samples in {seconds(prediction.step_s)}.",
        step_shares(plan, prediction),
    ]
    needed_bytes = prediction.memory.device_bytes
    if needed_bytes > inputs.capacity_bytes:
        sentences.append(f"It does not fit: it {too_large(needed_bytes, inputs)}.")
    sentences.append(_basis(inputs, profiles))
    return PlanReport(((plan, prediction),), tuple(sentences), (), 1)


def _basis(inputs: PlanningInputs, profiles: Profiles) -> str:
    return f"Based on: {inputs.cluster.based_on} hardware, {profiles.method}."


def _entry(plan: Plan, prediction: Prediction) -> dict[str, Any]:
    return {
        "plan": _plan_dict(plan),
        "summary": plan.summary(),
        "step_s": prediction.step_s,
        "memory_bytes": prediction.memory_bytes,
        "breakdown": prediction.breakdown,
        "based_on": prediction.based_on,
    }


def _plan_dict(plan: Plan) -> dict[str, Any]:
    return plan.model_dump(mode="json")


def show(report: PlanReport, inputs: PlanningInputs, console: Console, took_s: float) -> None:
    """Prints the choice, the ranked plans, the sentences, the rejected plans, and the best plan in the format of a plan
    file. `took_s` is the time that the search took."""
    if report.choice:
        console.print(f"{report.choice}\n", markup=False, highlight=False, soft_wrap=True)
    console.print(_ranked_table(report, inputs))
    for line in report.explanation:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if report.rejected:
        table = Table("rejected", "because", box=None, padding=(0, 2, 0, 0))
        for plan, words in report.rejected:
            table.add_row(plan.summary(), words)
        console.print()
        console.print(table)
    console.print(f"\n# the best plan, for train --plan FILE ({took_s:.1f} s)", markup=False, highlight=False)
    print(report.ranked[0][0].to_yaml(), end="", file=console.file)


def _ranked_table(report: PlanReport, inputs: PlanningInputs) -> Table:
    table = Table("plan", "step", "samples/s", "memory", "compute", "exposed", "bubble", box=None, padding=(0, 2, 0, 0))
    for row in _rows(report, inputs):
        table.add_row(*row)
    return table


def _rows(report: PlanReport, inputs: PlanningInputs) -> Iterator[tuple[str, ...]]:
    for plan, prediction in report.ranked:
        terms = prediction.breakdown
        exposed = sum(terms[name] for name in ("tensor", "pipeline", "replicate", "shard"))
        yield (
            plan.summary(),
            seconds(prediction.step_s),
            f"{inputs.global_batch / prediction.step_s:,.4g}",
            gib(prediction.memory.device_bytes),
            f"{terms['compute'] / prediction.step_s:.0%}",
            f"{exposed / prediction.step_s:.0%}",
            f"{terms['bubble'] / prediction.step_s:.0%}",
        )
