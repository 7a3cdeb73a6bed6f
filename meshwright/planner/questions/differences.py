"""`ask explain A B`: why one plan is faster than another, term by term of the step and of the memory."""

from collections.abc import Mapping
from typing import Any

from meshwright.errors import InputError
from meshwright.numbers.units import bytes_text, seconds_text
from meshwright.plan import Plan
from meshwright.plan_fields.constraints import FIELDS, shown
from meshwright.planner.explanation.report import predict_given_plan
from meshwright.planner.explanation.terms import term_words
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.preference import difference_error_s
from meshwright.planner.profiles import Profiles
from meshwright.planner.questions.answer import Answer
from meshwright.simulator.predict import Prediction


def explain_difference(first: Plan, second: Plan, inputs: PlanningInputs, profiles: Profiles) -> Answer:
    """Answers why one of the plans is faster. Raises an `InputError` if one cannot be predicted or executed."""
    (first, one), (second, other) = (
        _predicted(name, plan, inputs, profiles) for name, plan in (("first", first), ("second", second))
    )
    steps, memory = _terms(one.breakdown, other.breakdown), _terms(one.memory.breakdown, other.memory.breakdown)
    rows = [
        (term_words(first, name), seconds_text(a), seconds_text(b), _signed(b - a, seconds_text))
        for name, a, b in sorted(steps, key=lambda row: -abs(row[2] - row[1]))
        if a or b
    ]
    rows.append(
        (
            "whole step",
            seconds_text(one.step_s),
            seconds_text(other.step_s),
            _signed(other.step_s - one.step_s, seconds_text),
        )
    )
    rows += [
        (f"memory: {name}", bytes_text(a), bytes_text(b), _signed(b - a, bytes_text))
        for name, a, b in sorted(memory, key=lambda row: -abs(row[2] - row[1]))
        if a or b
    ]
    one_bytes, other_bytes = one.memory.device_bytes, other.memory.device_bytes
    rows.append(
        (
            "memory of a device",
            bytes_text(one_bytes),
            bytes_text(other_bytes),
            _signed(other_bytes - one_bytes, bytes_text),
        )
    )
    fields = _different_fields(first, second)
    values: dict[str, Any] = {
        "first": _values(first, one),
        "second": _values(second, other),
        "fields": fields,
        "rows": [{"term": name, "first_s": a, "second_s": b, "difference_s": b - a} for name, a, b in steps],
        "memory": [{"term": name, "first_bytes": a, "second_bytes": b} for name, a, b in memory],
    }
    sentences = _sentences(first, one, second, other, inputs)
    return Answer("difference", ("part", "first", "second", "difference"), tuple(rows), tuple(sentences), values)


def _predicted(name: str, plan: Plan, inputs: PlanningInputs, profiles: Profiles) -> tuple[Plan, Prediction]:
    """The plan, with cuts if it has a pipeline without them, and its prediction."""
    try:
        whole_plan, prediction = predict_given_plan(plan, inputs, profiles).ranked[0]
        inputs.check_plan(whole_plan)
    except InputError as error:
        raise InputError(f"the {name} plan cannot be run: {error}") from None
    return whole_plan, prediction


def _terms(one: Mapping[str, float], other: Mapping[str, float]) -> list[tuple[str, float, float]]:
    return [(name, one.get(name, 0.0), other.get(name, 0.0)) for name in dict.fromkeys((*one, *other))]


def _signed(value: float, text: Any) -> str:
    return f"{'−' if value < 0 else '+'}{text(abs(value))}" if value else "0"


def _different_fields(first: Plan, second: Plan) -> dict[str, list[Any]]:
    one, other = first.model_dump(mode="json"), second.model_dump(mode="json")
    fields = {}
    for name in FIELDS:
        group, field = name.split(".")
        if one[group][field] != other[group][field]:
            fields[name] = [one[group][field], other[group][field]]
    return fields


def _values(plan: Plan, prediction: Prediction) -> dict[str, Any]:
    return {
        "summary": plan.summary(),
        "step_s": prediction.step_s,
        "device_bytes": prediction.memory.device_bytes,
        "breakdown": prediction.breakdown,
    }


def _sentences(first: Plan, one: Prediction, second: Plan, other: Prediction, inputs: PlanningInputs) -> list[str]:
    names = {id(one): "the first", id(other): "the second"}
    fast, slow = (one, other) if one.step_s <= other.step_s else (other, one)
    slow_plan = second if slow is other else first
    gap = slow.step_s - fast.step_s
    sentences = []
    if gap > 0:
        name = max(slow.breakdown, key=lambda term: slow.breakdown[term] - fast.breakdown.get(term, 0.0))
        extra = slow.breakdown[name] - fast.breakdown.get(name, 0.0)
        sentences.append(
            f"{names[id(fast)].capitalize()} plan is faster by {seconds_text(gap)} of a step"
            f" ({slow.step_s / fast.step_s - 1:.1%}). The largest difference is {term_words(slow_plan, name)}, which"
            f" takes {seconds_text(extra)} more in {names[id(slow)]} plan."
        )
        if gap <= difference_error_s(one, other):
            sentences.append("The difference is within the error of predictions, so measure both where it matters.")
    else:
        sentences.append("Both plans are predicted to be equally fast.")
    for name, prediction in (("first", one), ("second", other)):
        if not inputs.fits(prediction):
            sentences.append(
                f"The {name} plan does not fit: it needs {bytes_text(prediction.memory.device_bytes)}, and a plan"
                " may use"
                f" {bytes_text(inputs.capacity_bytes)} of one {inputs.device.name}."
            )
    changed = [f"{name}: {shown(a)} → {shown(b)}" for name, (a, b) in _different_fields(first, second).items()]
    sentences.append(f"They differ in {'; '.join(changed)}." if changed else "The plans are the same.")
    return sentences
