"""`Answer`: what every question returns, as a table with sentences for people and as JSON for scripts; and
`PlannedPoint`, the best plan for one cluster and batch, of which answers are made."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from meshwright.cluster.cluster import Cluster, Device
from meshwright.errors import InputError
from meshwright.numbers.units import bytes_text, number_text, seconds_text
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.measured_search import measured_search
from meshwright.planner.profiles import Profiles
from meshwright.planner.questions.variations import changed, is_improvement
from meshwright.planner.search_result import PricedPlan
from meshwright.simulator.predict import predict_plan

_HOUR_S = 3600.0
_BILLION = 1e9


@dataclass(frozen=True)
class Answer:
    """The answer to a question. `values` are plain values; they include `rows`, of which the table shows a part."""

    question: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    sentences: tuple[str, ...]
    values: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"question": self.question, **self.values, "explanation": " ".join(self.sentences)}


def show_answer(answer: Answer, console: Console) -> None:
    """Prints the table and the sentences of an answer. Plans are long, so they are listed below the table."""
    has_plans = answer.columns[-1] == "plan"
    columns = answer.columns[:-1] if has_plans else answer.columns
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    for row in answer.rows:
        table.add_row(*row[: len(columns)])
    if answer.rows:
        console.print(table)
        console.print()
    plans = [f"{row[0]}: {row[-1]}" for row in answer.rows] if has_plans else []
    for line in (*plans, *([""] if plans else []), *answer.sentences):
        console.print(line, markup=False, highlight=False, soft_wrap=not console.is_terminal)


@dataclass(frozen=True)
class PlannedPoint:
    """The best plan for one value of what a question varies. `problem` says why there is none."""

    label: str
    inputs: PlanningInputs
    best: PricedPlan | None
    problem: str = ""
    tokens_per_sample: int = 0

    @property
    def step_s(self) -> float:
        assert self.best is not None
        return self.best.prediction.step_s

    @property
    def samples_per_s(self) -> float:
        return self.inputs.global_batch / self.step_s if self.best is not None else 0.0

    @property
    def devices(self) -> int:
        return self.inputs.cluster.device_count

    @property
    def price_per_hour(self) -> float | None:
        return self.inputs.cluster.price_per_hour

    @property
    def epoch_s(self) -> float | None:
        """The seconds of an epoch; None if its length is not known."""
        samples = self.inputs.epoch_samples
        if samples is None or self.best is None:
            return None
        return -(-samples // self.inputs.global_batch) * self.step_s

    def cost_of(self, duration_s: float | None) -> float | None:
        price = self.price_per_hour
        return None if price is None or duration_s is None else price * duration_s / _HOUR_S

    @property
    def billion_tokens_s(self) -> float | None:
        """The seconds of a billion tokens; None for a model without tokens."""
        if not self.tokens_per_sample or self.best is None:
            return None
        return _BILLION / (self.samples_per_s * self.tokens_per_sample)

    def values(self) -> dict[str, Any]:
        """The point as plain values. Without a plan, `step_s` is None, and `problem` says why."""
        common = {
            "value": self.label,
            "cluster": self.inputs.cluster.name,
            "devices": self.devices,
            "global_batch": self.inputs.global_batch,
            "price_per_hour": self.price_per_hour,
        }
        if self.best is None:
            return {**common, "step_s": None, "problem": self.problem}
        return {
            **common,
            "plan": self.best.plan.model_dump(mode="json"),
            "summary": self.best.plan.summary(),
            "step_s": self.step_s,
            "samples_per_s": self.samples_per_s,
            "memory_bytes": self.best.prediction.memory_bytes,
            "device_bytes": self.best.needed_bytes,
            "breakdown": self.best.prediction.breakdown,
            "epoch_s": self.epoch_s,
            "epoch_cost": self.cost_of(self.epoch_s),
            "billion_tokens_cost": self.cost_of(self.billion_tokens_s),
        }

    def cells(self) -> tuple[str, str, str, str]:
        """The step, the samples per second, the memory and the plan, as a table shows them."""
        if self.best is None:
            return "–", "–", "–", shortened(self.problem)
        memory = bytes_text(self.best.needed_bytes)
        return seconds_text(self.step_s), number_text(self.samples_per_s), memory, self.best.plan.summary()


_PLATFORMS = {"rocm": "GPUs of AMD", "gaudi": "Gaudis", "mps": "GPUs of Apple"}


def estimates(points: Sequence[PlannedPoint]) -> list[str]:
    """A sentence about the points whose devices Meshwright has never run on."""
    return estimate_of([node.device for point in points for node in point.inputs.cluster.nodes])


def estimate_of(devices: Sequence[Device]) -> list[str]:
    """A sentence about those of the devices that Meshwright has never run on; none if it has run on all kinds."""
    others = {device.name: _PLATFORMS[device.platform] for device in devices if device.platform in _PLATFORMS}
    if not others:
        return []
    return [
        f"The figures of {', '.join(others)} are estimates from published rates and links: nothing of Meshwright has"
        f" been run on {' and '.join(dict.fromkeys(others.values()))}."
    ]


InputsOn = Callable[[Cluster], tuple[PlanningInputs, Profiles]]
"""The inputs of a search, and the profiles, on a cluster."""


def inputs_on_cluster(
    cluster: Cluster, inputs: PlanningInputs, profiles: Profiles, inputs_on: InputsOn | None
) -> tuple[PlanningInputs, Profiles]:
    """The inputs and profiles on another cluster. CPUs and GPUs need other profiles, which `inputs_on` makes. Raises an
    `InputError` without it."""
    if cluster.kind == inputs.cluster.kind:
        return replace(inputs, cluster=cluster), profiles
    if inputs_on is None:
        raise InputError(
            f"'{cluster.name}' and '{inputs.cluster.name}' have different kinds of devices, {cluster.kind} and"
            f" {inputs.cluster.kind}: ask for each of them alone"
        )
    return inputs_on(cluster)


def plan_point(label: str, inputs: PlanningInputs, profiles: Profiles) -> PlannedPoint:
    """Searches for the best plan with these inputs, as for a single plan. The profile of the model is traced once for
    all points."""
    try:
        result, inputs = measured_search(inputs, profiles)
    except InputError as error:  # no plan fits, or the batch cannot be divided
        return PlannedPoint(label, inputs, None, str(error))
    return PlannedPoint(label, inputs, result.ranked[0], "", result.summary.sequence_length)


def plan_changed_point(point: PlannedPoint, change: str, profiles: Profiles) -> PlannedPoint:
    """The same point on a cluster with the change, as `what-if` writes it. An improvement makes no step longer. The
    search may say so, because it prefers simple plans that are slower within the error of predictions. The plan of the
    point is then the answer, at most with the step that it had without the change: plans with a pipeline, or with both
    replicas and shards, can be predicted to take longer on faster devices (docs/questions.md)."""
    inputs = replace(point.inputs, cluster=changed(point.inputs.cluster, change))
    other = plan_point(point.label, inputs, profiles)
    if point.best is None or (other.best is not None and other.step_s <= point.step_s):
        return other
    if not is_improvement(point.inputs.cluster, change):
        return other
    kept = priced_again(point.best, inputs, profiles)
    best = kept if kept is not None and kept.prediction.step_s <= point.step_s else point.best
    return replace(other, best=best, problem="", tokens_per_sample=point.tokens_per_sample)


def priced_again(priced: PricedPlan, inputs: PlanningInputs, profiles: Profiles) -> PricedPlan | None:
    """The plan with its prediction for other inputs; None if it does not fit, or not the batch."""
    plan, batch, shares = priced.plan, inputs.global_batch, priced.plan.shares.samples
    is_even = inputs.even_shares and not shares
    if batch < plan.batch_parts or (is_even and batch % plan.batch_parts) or (shares and sum(shares) != batch):
        return None
    profile = profiles.get(plan.numerics.precision, plan.memory.recompute)
    prediction = predict_plan(inputs.cluster, profile, plan, batch, inputs.optimizer, runtime=inputs.runtime)
    return PricedPlan(priced.candidate, plan, prediction) if inputs.fits(prediction) else None


def with_cluster_price(inputs: PlanningInputs, price_per_device: float | None) -> PlanningInputs:
    """The inputs with a cluster of this price for a device and hour; unchanged if it is None."""
    if price_per_device is None:
        return inputs
    price = price_per_device * inputs.cluster.device_count
    return replace(inputs, cluster=inputs.cluster.model_copy(update={"price_per_hour": price}))


def shortened(text: str, most: int = 80) -> str:
    first = text.partition(":")[0] if len(text) > most else text
    return first if len(first) <= most else f"{first[: most - 1]}…"
