"""What `meshwright plan` answers: one JSON object for scripts, a table and sentences for people."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.planner.explain import explain, gib, reason, seconds, too_large
from meshwright.planner.profiles import Profiles
from meshwright.planner.question import Question
from meshwright.planner.search import Found
from meshwright.simulator.predict import Prediction, predict_plan


@dataclass(frozen=True)
class Answer:
    """`rejected` are pairs of a plan and the reason."""

    ranked: tuple[tuple[Plan, Prediction], ...]
    explanation: tuple[str, ...]
    rejected: tuple[tuple[Plan, str], ...]
    candidates: int

    def to_dict(self) -> dict[str, Any]:
        ranked = [_entry(plan, prediction) for plan, prediction in self.ranked]
        return {
            "best": ranked[0],
            "ranked": ranked,
            "explanation": " ".join(self.explanation),
            "rejected": [{"plan": _plain(plan), "reason": why} for plan, why in self.rejected],
            "candidates": self.candidates,
        }


def answer(found: Found, question: Question, profiles: Profiles) -> Answer:
    """All that a search found, in words."""
    best = found.ranked[0]
    told = {choice.candidate for choice in found.ranked}
    rejected = [
        (choice.plan, reason(choice, best, question))
        for choice in sorted(found.others, key=lambda choice: choice.prediction.step_s)
        if choice.candidate not in told
    ]
    rejected += [(gone.plan, too_large(gone.needs_bytes, question, at_least=True)) for gone in found.excluded]
    return Answer(
        tuple((choice.plan, choice.prediction) for choice in found.ranked),
        (*explain(found, question), f"Based on: {basis(question, profiles)}."),
        tuple(rejected),
        found.candidates,
    )


def of_one(plan: Plan, question: Question, profiles: Profiles) -> Answer:
    """The prediction of a plan that was given."""
    cluster = question.cluster
    fewer = plan.world_size < cluster.devices and question.global_batch < cluster.devices
    if plan.world_size != cluster.devices and not fewer:
        raise InputError(
            f"the plan ({plan.summary()}) is for {plan.world_size} ranks, but the cluster '{cluster.name}' has"
            f" {cluster.devices} devices: choose axes whose product is {cluster.devices}, or another cluster"
        )
    profile = profiles.get(plan.numerics.precision, plan.memory.recompute)
    predicted = predict_plan(cluster, profile, plan, question.global_batch, question.optimizer)
    words = [f"{plan.summary()} trains {question.global_batch} samples in {seconds(predicted.step_s)}."]
    needs = predicted.memory.device_bytes
    if needs > question.capacity_bytes:
        words.append(f"It does not fit: it {too_large(needs, question)}.")
    words.append(f"Based on: {basis(question, profiles)}.")
    return Answer(((plan, predicted),), tuple(words), (), 1)


def basis(question: Question, profiles: Profiles) -> str:
    return f"{question.cluster.based_on} hardware, {profiles.how}"


def _entry(plan: Plan, prediction: Prediction) -> dict[str, Any]:
    return {
        "plan": _plain(plan),
        "summary": plan.summary(),
        "step_s": prediction.step_s,
        "memory_bytes": prediction.memory_bytes,
        "breakdown": prediction.breakdown,
        "based_on": prediction.based_on,
    }


def _plain(plan: Plan) -> dict[str, Any]:
    return plan.model_dump(mode="json")


def show(answered: Answer, question: Question, console: Console, took_s: float) -> None:
    """For people: the ranked plans, why, what was rejected, and the winner as a file."""
    console.print(_ranked(answered, question))
    for line in answered.explanation:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if answered.rejected:
        table = Table("rejected", "because", box=None, padding=(0, 2, 0, 0))
        for plan, why in answered.rejected:
            table.add_row(plan.summary(), why)
        console.print()
        console.print(table)
    console.print(f"\n# the best plan, for train --plan FILE ({took_s:.1f} s)", markup=False, highlight=False)
    print(answered.ranked[0][0].to_yaml(), end="", file=console.file)


def _ranked(answered: Answer, question: Question) -> Table:
    table = Table("plan", "step", "samples/s", "memory", "compute", "exposed", "bubble", box=None, padding=(0, 2, 0, 0))
    for row in _rows(answered, question):
        table.add_row(*row)
    return table


def _rows(answered: Answer, question: Question) -> Iterator[tuple[str, ...]]:
    for plan, prediction in answered.ranked:
        parts = prediction.breakdown
        exposed = sum(parts[name] for name in ("tensor", "pipeline", "replicate", "shard"))
        yield (
            plan.summary(),
            seconds(prediction.step_s),
            f"{question.global_batch / prediction.step_s:,.4g}",
            gib(prediction.memory.device_bytes),
            f"{parts['compute'] / prediction.step_s:.0%}",
            f"{exposed / prediction.step_s:.0%}",
            f"{parts['bubble'] / prediction.step_s:.0%}",
        )
