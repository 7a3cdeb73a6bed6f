"""`ask sweep`: the best plan for each of several numbers of devices, machines, links, GPUs, batches or sequences.

speed         samples per second
efficiency    speed of a device, as a share of that at the first point that has a plan
gain          (speed - speed before) / (devices - devices before), as a share of the speed of a device at the
              first point. Scaling stops paying where it falls below `_PAYS`                      stops_paying
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from meshwright.numbers.units import duration_text, number_text, seconds_text
from meshwright.planner.explanation.explain import step_shares
from meshwright.planner.explanation.terms import term_words
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.profiles import Profiles
from meshwright.planner.questions.answer import (
    Answer,
    InputsOn,
    PlannedPoint,
    estimates,
    inputs_on_cluster,
    plan_changed_point,
    plan_point,
)
from meshwright.planner.questions.variations import changed, varied

_PAYS = 0.5  # chosen: an additional device that adds less than half of what the first ones do
PointInputs = Callable[[str], tuple[PlanningInputs, Profiles]]
"""The inputs and profiles of a point, for values that change the model."""


def sweep(
    name: str,
    values: Sequence[str],
    inputs: PlanningInputs,
    profiles: Profiles,
    what_if: Sequence[str] = (),
    inputs_of: PointInputs | None = None,
    inputs_on: InputsOn | None = None,
) -> Answer:
    """Answers the question. `inputs_of` returns the inputs of a point if they are not `varied` ones of `inputs`,
    `inputs_on` those on a cluster of another kind of devices. For each change of `what_if`, the sweep is repeated with
    a cluster that has it."""
    points, others = sweep_points(name, values, inputs, profiles, what_if, inputs_of, inputs_on)
    scales = name in ("devices", "nodes")
    sentences = list(_scaling_sentences(points, name)) if scales else list(_best_sentences(points, name))
    sentences += [_change_sentence(points, some, change, name) for change, some in others.items()]
    sentences += estimates(points)
    columns, rows = _table(points, name, others)
    values_of_points = _values(points)
    return Answer(
        "sweep",
        columns,
        rows,
        tuple(sentences),
        {
            "over": name,
            "rows": values_of_points,
            "stops_paying_at": (stop.label if scales and (stop := stops_paying(points)) else None),
            "what_if": [{"change": change, "rows": _values(some)} for change, some in others.items()],
        },
    )


def sweep_points(
    name: str,
    values: Sequence[str],
    inputs: PlanningInputs,
    profiles: Profiles,
    what_if: Sequence[str] = (),
    inputs_of: PointInputs | None = None,
    inputs_on: InputsOn | None = None,
) -> tuple[list[PlannedPoint], dict[str, list[PlannedPoint]]]:
    """The best plan for each value; and for each change of `what_if`, the best plans with it. Wrong values and changes
    are named before the first search."""
    for change in what_if:
        changed(inputs.cluster, change)
    all_inputs: dict[str, tuple[PlanningInputs, Profiles]] = {}
    for value in values:
        other = varied(inputs, name, value)
        on_same_cluster = replace(other, cluster=inputs.cluster)
        all_inputs[value] = inputs_on_cluster(other.cluster, on_same_cluster, profiles, inputs_on)
    points: list[PlannedPoint] = []
    others: dict[str, list[PlannedPoint]] = {change: [] for change in what_if}
    for value in values:
        own, own_profiles = inputs_of(value) if inputs_of else all_inputs[value]
        points.append(plan_point(value, own, own_profiles))
        for change, changed_points in others.items():
            changed_points.append(plan_changed_point(points[-1], change, own_profiles))
    return points, others


def efficiency(point: PlannedPoint, first: PlannedPoint) -> float:
    """The speed of a device, as a share of that at the first point."""
    return (point.samples_per_s / point.devices) / (first.samples_per_s / first.devices)


def stops_paying(points: Sequence[PlannedPoint]) -> PlannedPoint | None:
    """The last point before additional devices add less than half of what the first ones do; None if all of them
    pay."""
    planned = [point for point in points if point.best is not None]
    for before, after in pairwise(planned):
        first_speed = planned[0].samples_per_s / planned[0].devices
        gain = (after.samples_per_s - before.samples_per_s) / max(1, after.devices - before.devices)
        if gain < _PAYS * first_speed:
            return before
    return None


def _values(points: Sequence[PlannedPoint]) -> list[dict[str, Any]]:
    first = next((point for point in points if point.best is not None), None)
    return [
        {**point.values(), "efficiency": efficiency(point, first) if first is not None and point.best else None}
        for point in points
    ]


def _table(
    points: Sequence[PlannedPoint], name: str, others: dict[str, list[PlannedPoint]]
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    first = next((point for point in points if point.best is not None), None)
    has_price = any(point.price_per_hour is not None for point in points)
    has_epoch = any(point.epoch_s is not None for point in points)
    has_tokens = any(point.tokens_per_sample for point in points)
    share_name = "efficiency" if name in ("devices", "nodes") else "speed of a device"
    columns = [name, "step", "samples/s", share_name, *(f"with {change}" for change in others), "memory"]
    columns += ["epoch"] * has_epoch + ["cost of an epoch"] * (has_epoch and has_price)
    columns += ["cost of 10⁹ tokens"] * (has_tokens and has_price)
    rows = []
    for number, point in enumerate(points):
        step, speed, memory, plan = point.cells()
        share = f"{efficiency(point, first):.0%}" if first is not None and point.best is not None else "–"
        row = [point.label, step, speed, share, *(some[number].cells()[1] for some in others.values()), memory]
        costs = [number_text(point.cost_of(length_s)) for length_s in (point.epoch_s, point.billion_tokens_s)]
        row += [duration_text(point.epoch_s)] * has_epoch + costs[:1] * (has_epoch and has_price)
        row += costs[1:] * (has_tokens and has_price)
        rows.append((*row, plan))
    return (*columns, "plan"), tuple(rows)


def _named(point: PlannedPoint, name: str) -> str:
    """The value of a point with what it counts, such as `8 devices` or `gpu H100`."""
    if name not in ("devices", "nodes"):
        return f"{name} {point.label}"
    return f"{int(point.label):,} {name if point.label != '1' else name.removesuffix('s')}"


def _scaling_sentences(points: Sequence[PlannedPoint], name: str) -> list[str]:
    planned = [point for point in points if point.best is not None]
    if not planned:
        return [f"No plan fits: {points[-1].problem}"]
    sentences = []
    if missing := [point.label for point in points if point.best is None]:
        sentences.append(f"No plan fits on {', '.join(missing)} {name}.")
    stop = stops_paying(points)
    if stop is None:
        last = planned[-1]
        if len(planned) > 1:
            sentences.append(
                f"Scaling pays up to {_named(last, name)}, the largest number asked for: a device does"
                f" {efficiency(last, planned[0]):.0%} of what it does on {_named(planned[0], name)}."
            )
        return sentences
    after = planned[planned.index(stop) + 1]
    assert after.best is not None
    speed = after.samples_per_s / stop.samples_per_s
    sentences.append(
        f"Scaling stops paying at {_named(stop, name)}: {after.devices / stop.devices:.3g} times the devices are"
        f" {speed:.3g} times as fast."
    )
    sentences.append(f"On {_named(after, name)}: {step_shares(after.best.plan, after.best.prediction)}")
    if grown := _grown_term(stop, after):
        sentences.append(grown)
    return sentences


def _grown_term(before: PlannedPoint, after: PlannedPoint) -> str:
    """Says which part of the step does not shrink as the devices grow."""
    assert before.best is not None
    assert after.best is not None
    terms, earlier = after.best.prediction.breakdown, before.best.prediction.breakdown
    ideal = before.devices / after.devices
    name = max(terms, key=lambda term: terms[term] - ideal * earlier.get(term, 0.0))
    lost = terms[name] - ideal * earlier.get(name, 0.0)
    if lost <= 0:
        return ""
    change = _CHANGES.get(name, "link=2x")
    advice = f"meshwright ask what-if JOB {change} says what that would change" if change else _LARGER_BATCH
    return (
        f"What keeps it from scaling most is {term_words(after.best.plan, name)}: {seconds_text(terms[name])} of a"
        " step,"
        f" {seconds_text(lost)} more than if it had shrunk with the number of devices. {advice}."
    )


_CHANGES = {"compute": "compute=2x", "optimizer": "compute=2x", "bubble": "memory=2x", "offload": "memory=2x"}
_CHANGES["launch"] = ""  # no device or link makes the host start operators faster
_LARGER_BATCH = "A larger batch gives devices more to do for each operator that the host starts"


def _best_sentences(points: Sequence[PlannedPoint], name: str) -> list[str]:
    planned = [point for point in points if point.best is not None]
    if not planned:
        return [f"No plan fits: {points[-1].problem}"]
    fastest = max(planned, key=lambda point: point.samples_per_s)
    sentences = [
        f"The fastest is {name} {fastest.label}, with {number_text(fastest.samples_per_s)} samples per second."
    ]
    priced = [point for point in planned if point.price_per_hour]
    if priced:
        cheapest = min(priced, key=lambda point: (point.price_per_hour or 0.0) / point.samples_per_s)
        sentences.append(f"The cheapest per sample is {name} {cheapest.label}.")
    missing = [point.label for point in points if point.best is None]
    return [*sentences, *([f"No plan fits with {name} {', '.join(missing)}."] if missing else [])]


def _change_sentence(points: Sequence[PlannedPoint], others: Sequence[PlannedPoint], change: str, name: str) -> str:
    pairs = [(old, new) for old, new in zip(points, others, strict=True) if old.best and new.best]
    if not pairs and not any(new.best for new in others):
        return f"With {change}, no plan fits{'' if any(old.best for old in points) else ' either'}."
    words = f"With {change}"
    if pairs:
        old, new = pairs[-1]
        gain = new.samples_per_s / old.samples_per_s - 1
        words += (
            f", {_named(old, name)} would train {abs(gain):.1%} {'more' if gain >= 0 else 'fewer'} samples per second"
        )
    fits = [new.label for old, new in zip(points, others, strict=True) if old.best is None and new.best]
    if fits:
        words += f",{' and' if pairs else ''} plans would fit with {name} {', '.join(fits)}"
    if name in ("devices", "nodes"):
        stop = stops_paying(others)
        words += f"; scaling would stop paying at {_named(stop, name)}" if stop else "; scaling would pay at all sizes"
    return f"{words}."
