"""`PlanReport`: the output of `meshwright plan`, as JSON for scripts, or as a table and sentences for people."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from meshwright.cluster.busy import busy_sentence
from meshwright.cluster.cluster import BasedOn
from meshwright.cluster.selftest_record import untested_parts
from meshwright.numbers.units import bytes_text, number_text, seconds_text
from meshwright.plan import Plan
from meshwright.planner.constraints.missing_cuts import lacks_cuts, with_cuts
from meshwright.planner.explanation.choice import describe_choice
from meshwright.planner.explanation.constraint_cost import cost_sentences, cost_values
from meshwright.planner.explanation.explain import explain, rounded_shares, step_shares, too_large
from meshwright.planner.explanation.headline import Headline, headline
from meshwright.planner.explanation.host_memory import host_memory
from meshwright.planner.explanation.plain import PlainPlan, plain_plans
from meshwright.planner.explanation.rejected import rejected_plans
from meshwright.planner.explanation.unequal import shares_sentence
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.profiles import Profiles
from meshwright.planner.search_result import PricedPlan, SearchResult
from meshwright.planner.summarize import summarize_model
from meshwright.planner.unequal.division import with_cuts_by_speed
from meshwright.simulator.predict import GroupPrediction, Prediction, check_size, predict_plan


@dataclass(frozen=True)
class PlanReport:
    """The result of a search, or of one given plan: the best plans with their predictions (the fastest first),
    sentences about the best plan, and rejected plans with the reasons. `candidate_count` is the number of plans that
    were considered. `choice` is the line about the best plan at the top (choice.py), empty for a given plan. `untested`
    are the parts of each ranked plan that have never run on several GPUs of this kind (cluster/selftest_record.py).
    `constraints` are those of the search, and what they cost (constraint_cost.py). `headline` is the first line, with
    the plain plans that the best one is compared with (plain.py)."""

    headline: Headline
    ranked: tuple[tuple[Plan, Prediction], ...]
    explanation: tuple[str, ...]
    rejected: tuple[tuple[Plan, str], ...]
    candidate_count: int
    choice: str = ""
    untested: tuple[tuple[str, ...], ...] = ()
    constraints: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        ranked = [
            {**_entry(plan, prediction), "untested": list(parts)}
            for (plan, prediction), parts in zip(self.ranked, self.untested, strict=True)
        ]
        return {
            "headline": str(self.headline),
            "figures": self.headline.to_dict(),
            "choice": self.choice,
            "best": ranked[0],
            "ranked": ranked,
            "plain": [_plain_entry(plain) for plain in self.headline.plain],
            "explanation": " ".join(self.explanation),
            "rejected": [{"plan": _plan_dict(plan), "reason": words} for plan, words in self.rejected],
            "candidates": self.candidate_count,
            **({"constraints": self.constraints} if self.constraints is not None else {}),
        }


def report_search(
    result: SearchResult, inputs: PlanningInputs, profiles: Profiles, free: PricedPlan | None = None
) -> PlanReport:
    """Returns the report of a search. Rejected are the best plans of families that are not ranked, and plans that need
    too much memory. `free` is the best plan without the constraints of the inputs, if there are any."""
    best = result.ranked[0]
    constraints = inputs.constraints
    costs = cost_sentences(constraints, best, free, inputs.allow) if free is not None else []
    rejected = rejected_plans(result, inputs, profiles)
    untested = tuple(untested_parts(priced.plan, inputs.cluster) for priced in result.ranked)
    return PlanReport(
        headline(best.plan, best.prediction, inputs, profiles, plain_plans(result, rejected)),
        tuple((priced.plan, priced.prediction) for priced in result.ranked),
        (*costs, *explain(result, inputs), _basis(inputs, profiles), *_untested_sentence(untested[0], inputs)),
        tuple((item.plan, item.words) for item in rejected),
        result.candidate_count,
        describe_choice(result, inputs, profiles),
        untested,
        cost_values(constraints, best, free) if free is not None else None,
    )


def predict_given_plan(plan: Plan, inputs: PlanningInputs, profiles: Profiles) -> PlanReport:
    """Returns the report of one plan that the user gave, without a search. Raises an `InputError` if the plan needs
    more devices than there are."""
    cluster, devices = inputs.cluster, inputs.cluster.device_count
    check_size(plan, cluster, inputs.global_batch)
    if lacks_cuts(plan):
        summary = summarize_model(inputs, profiles, plan.numerics.precision)
        plan = with_cuts_by_speed(with_cuts(plan, summary), inputs, summary)
    profile = profiles.get(plan.numerics.precision, plan.memory.recompute)
    prediction = predict_plan(cluster, profile, plan, inputs.global_batch, inputs.optimizer, runtime=inputs.runtime)
    used = f" on {plan.world_size} of {devices} devices" if plan.world_size < devices else ""
    sentences = [
        f"{plan.summary()}{used} trains {inputs.global_batch} samples in {seconds_text(prediction.step_s)}.",
        step_shares(plan, prediction),
    ]
    sentences += shares_sentence(plan, prediction)
    if not inputs.fits(prediction):
        needed_bytes, device = prediction.memory.device_bytes, prediction.fullest_device
        sentences.append(f"It does not fit: it {too_large(needed_bytes, inputs, device=device)}.")
    sentences += host_memory(plan, prediction, inputs)
    untested = untested_parts(plan, cluster)
    sentences += [_basis(inputs, profiles), *_untested_sentence(untested, inputs)]
    line = headline(plan, prediction, inputs, profiles)
    return PlanReport(line, ((plan, prediction),), tuple(sentences), (), 1, untested=(untested,))


_HARDWARE: dict[BasedOn, str] = {
    "measured": "this machine as it was measured",
    "measured here, with the model's own shapes": "this machine, on which the model's own operators were measured",
    "calibrated": "a calibration of the device (doctor --calibrate)",
    "datasheet": "data sheets of the hardware",
    "detected": "what is known of the hardware without measuring it",
}


_PLATFORMS = {"rocm": "AMD's GPUs", "gaudi": "Gaudis", "mps": "Apple's GPUs"}


def _basis(inputs: PlanningInputs, profiles: Profiles) -> str:
    device = inputs.device
    if device.platform != "cuda":
        return (
            f"The prediction is based on published rates and links of the {device.name}, with the efficiencies of a"
            f" reference GPU of NVIDIA, and on {profiles.method}. Nothing of Meshwright has been run on"
            f" {_PLATFORMS[device.platform]}: take it as an estimate."
        )
    basis = f"The prediction is based on {_HARDWARE[inputs.cluster.based_on]}, and on {profiles.method}."
    busy = busy_sentence(inputs.cluster)
    return f"{basis} {busy}." if busy else basis


def _untested_sentence(parts: Sequence[str], inputs: PlanningInputs) -> Iterator[str]:
    """Yields the sentence about the parts of the best plan that are untested, if there are any."""
    if parts and inputs.device.platform == "cuda":  # elsewhere, `_basis` says that nothing has been run
        device = inputs.cluster.nodes[0].device.name
        yield (
            f"Untested (*) on several {device}: {', '.join(parts)}. `meshwright doctor --selftest` on a machine with"
            f" several {device} proves in a few minutes what it can run there."
        )


def _mark(plan: Plan, untested: Sequence[str]) -> str:
    return f"{plan.summary()} *" if untested else plan.summary()


def _entry(plan: Plan, prediction: Prediction) -> dict[str, Any]:
    dispatch = dict(zip(("expected", "worst"), prediction.dispatch_bytes, strict=True))
    return {
        "plan": _plan_dict(plan),
        "summary": plan.summary(),
        "step_s": prediction.step_s,
        "memory_bytes": prediction.memory_bytes,
        "breakdown": prediction.breakdown,
        "based_on": prediction.based_on,
        **({"dispatch_bytes": dispatch} if plan.axes.expert > 1 else {}),
        **({"data_ranks": [_group_entry(group) for group in prediction.groups]} if prediction.groups else {}),
    }


def _plain_entry(plain: PlainPlan) -> dict[str, Any]:
    """A plain plan, with `times`, how many times as fast the best plan is; None if the plain one does not fit."""
    values = _entry(plain.priced.plan, plain.priced.prediction) if plain.priced is not None else {}
    needed_bytes = plain.too_large_bytes if plain.priced is None else plain.priced.needed_bytes
    own = {"name": plain.name, "is_best": plain.is_best, "times": plain.times, "device_bytes": needed_bytes}
    return {**own, **values}


def _group_entry(group: GroupPrediction) -> dict[str, Any]:
    """Data ranks that are alike, on machines that are not."""
    return {
        "ranks": list(group.group.ranks),
        "devices": [node.device.name for node in group.group.nodes],
        "samples": group.group.samples,
        **({"shard_part": group.group.shard_part} if group.group.shard_part is not None else {}),
        "step_s": group.step.step_s,
        "device_bytes": [memory.device_bytes for memory in group.memory],
    }


def _plan_dict(plan: Plan) -> dict[str, Any]:
    return plan.model_dump(mode="json")


def show(report: PlanReport, inputs: PlanningInputs, console: Console, took_s: float, full: bool = False) -> None:
    """Prints the headline, the choice, the ranked plans and the plain ones, the sentences, the rejected plans, and the
    best plan in the format of a plan file: the fields that differ from their defaults, or all with `full`. `took_s` is
    the time that the search took."""
    _print_sentence(f"{report.headline}", console)
    if report.choice:
        _print_sentence(report.choice, console)
    console.print()
    for line in _narrow_table(report, inputs) if console.width < _WIDE else ():
        _print_sentence(line, console)
    if console.width >= _WIDE:
        console.print(_ranked_table(report, inputs))
    console.print()
    for line in report.explanation:
        _print_sentence(line, console)
    if report.rejected:
        table = Table("rejected", "because", box=None, padding=(0, 2, 0, 0), header_style="bold")
        for plan, words in report.rejected:
            table.add_row(plan.summary(), words)
        console.print()
        console.print(table)
    plan = report.ranked[0][0]
    fields = "all fields" if full else "what differs from the defaults"
    _print_sentence(f"\n# the best plan, for train --plan FILE: {fields} ({took_s:.1f} s)", console)
    print(plan.to_yaml(only_differences=not full), end="", file=console.file)


def _print_sentence(text: str, console: Console) -> None:
    """Prints a sentence: wrapped between words on a terminal, as one line elsewhere."""
    console.print(text, markup=False, highlight=False, soft_wrap=not console.is_terminal)


@dataclass(frozen=True)
class _Row:
    """One plan of the table."""

    name: str
    prediction: Prediction


def _rows(report: PlanReport, inputs: PlanningInputs) -> list[_Row]:
    """The ranked plans, then the plain ones that are not among them."""
    rows = [
        _Row(_mark(plan, untested), prediction)
        for (plan, prediction), untested in zip(report.ranked, report.untested, strict=True)
    ]
    ranked = [plan for plan, _ in report.ranked]
    for plain in report.headline.plain:
        if plain.priced is not None and plain.priced.plan not in ranked:
            marked = _mark(plain.priced.plan, untested_parts(plain.priced.plan, inputs.cluster))
            rows.append(_Row(f"{plain.name}: {marked}", plain.priced.prediction))
    return rows


def _ranked_table(report: PlanReport, inputs: PlanningInputs) -> Table:
    rows = _rows(report, inputs)
    columns, cells = _cells(rows, inputs)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("plan")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row, values in zip(rows, cells, strict=True):
        table.add_row(row.name, *values)
    return table


def _narrow_table(report: PlanReport, inputs: PlanningInputs) -> Iterator[str]:
    """Yields the table for narrow terminals, in which each plan has a line of its own above its numbers."""
    rows = _rows(report, inputs)
    columns, cells = _cells(rows, inputs)
    widths = [max(len(row[index]) for row in (columns, *cells)) for index in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        return "  " + "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))

    yield line(columns)
    for row, values in zip(rows, cells, strict=True):
        yield row.name
        yield line(values)


def _cells(plans: Sequence[_Row], inputs: PlanningInputs) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The columns of the table, and its rows. The columns after the memory are shares of the step. They add up to 100%;
    columns without any share are left out."""
    names = [name for name in _SHARES if any(_shares(row.prediction)[name] for row in plans)]
    rows = []
    for prediction in (row.prediction for row in plans):
        shares = _shares(prediction)
        rows.append(
            (
                seconds_text(prediction.step_s),
                number_text(inputs.global_batch / prediction.step_s),
                bytes_text(prediction.memory.device_bytes),
                *(f"{shares[name]}%" for name in names),
            )
        )
    return ("step", "samples/s", "memory", *names), rows


_WIDE = 100  # columns of a terminal in which a plan and its numbers fit on one line

# The columns of the table, and the terms of the prediction that each of them adds up. What is in none of them is other.
_SHARES = {
    "compute": ("compute",),
    "start": ("launch",),
    "exchange": ("context", "tensor", "pipeline", "replicate", "shard", "expert"),
    "bubble": ("bubble",),
    "other": (),
}


def _shares(prediction: Prediction) -> dict[str, int]:
    """The percentages of the step by column. They add up to 100."""
    columns = {term: name for name, terms in _SHARES.items() for term in terms}
    values = dict.fromkeys(_SHARES, 0.0)
    for term, value in prediction.breakdown.items():
        values[columns.get(term, "other")] += value
    return dict(zip(values, rounded_shares(list(values.values()), 100), strict=True))
