"""`doctor --job`: will a job run on a cluster, what does it need, what limits it, and what would help most.

limit     computing that arithmetic or memory limits (by the operators' FLOPs and bytes), network, launches, bubble,
          loader                                                                                        limits_of
changes   of the devices, the links, the batch or `allow`. Each is priced with the ranked plans as they are, or
          with a search of its own where that takes no longer than `_SEARCH_S`                   helpful_changes
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from meshwright.errors import InputError
from meshwright.numbers.units import bytes_text, number_text, seconds_text
from meshwright.planner.constraints.apply import unconstrained
from meshwright.planner.explanation.terms import COMMUNICATION, TERMS
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.offload import search_with_offload
from meshwright.planner.profiles import Profiles
from meshwright.planner.questions.answer import Answer, estimate_of, priced_again
from meshwright.planner.questions.variations import changed
from meshwright.planner.search_result import PricedPlan, SearchResult
from meshwright.profile.values import ModelProfile

_SEARCH_S = 3.0
_MOST_CHANGES = 3
_LEAST_GAIN = 0.01
_NAMES = {
    "arithmetic": "computing, limited by arithmetic",
    "memory": "computing, limited by the memory's bandwidth",
    "network": "exchanges between ranks",
    "launches": TERMS["launch"],
    "bubble": TERMS["bubble"],
    "loader": "loading samples",
    "offload": "copies from and to CPU memory",
}


@dataclass(frozen=True)
class Change:
    """A change of the job or the cluster, and how many times as many samples per second it gives. `is_searched`: plans
    were searched for again, otherwise those of the first search were priced, and the gain may be larger."""

    words: str
    speedup: float
    is_searched: bool


def limits_of(best: PricedPlan, profile: ModelProfile, inputs: PlanningInputs, loader_s: float) -> dict[str, float]:
    """The seconds of a step by what limits them. `loader_s` are those in which ranks wait for samples."""
    terms = best.prediction.breakdown
    computing = terms.get("compute", 0.0) + terms.get("optimizer", 0.0)
    share = arithmetic_share(profile, inputs, best.prediction.batch_per_rank)
    limits = {
        "arithmetic": share * computing,
        "memory": (1 - share) * computing,
        "network": sum(terms.get(name, 0.0) for name in COMMUNICATION),
        "launches": terms.get("launch", 0.0),
        "bubble": terms.get("bubble", 0.0),
        "offload": terms.get("offload", 0.0),
        "loader": terms.get("input", 0.0) + loader_s,
    }
    return dict(sorted(limits.items(), key=lambda item: -item[1]))


def arithmetic_share(profile: ModelProfile, inputs: PlanningInputs, batch: float) -> float:
    """The share of the operators' time, at the rates of the data sheet, in operators for which arithmetic takes longer
    than reading and writing memory."""
    device = inputs.device
    rates = {"float32": "tf32" if profile.precision == "tf32" else "fp32", "bfloat16": "bf16", "float16": "fp16"}
    bound = total = 0.0
    for segment in profile.segments:
        for operator in segment.operators:
            rate_name: Any = rates.get(operator.dtype, "fp32")
            per_s = device.rates.get(rate_name) or device.rates.get("fp32", 1.0)
            flops_s = operator.flops.at(batch) / per_s
            bytes_s = operator.bytes.at(batch) / max(device.bandwidth_bytes_per_s, 1.0)
            longest = max(flops_s, bytes_s) * segment.block_count
            total += longest
            bound += longest if flops_s > bytes_s else 0.0
    return bound / total if total else 0.0


@dataclass(frozen=True)
class Loading:
    """How fast samples are loaded; None if it was not measured. `is_first`: a rank loads a batch before it computes,
    instead of at the same time."""

    samples_per_s: float | None = None
    is_first: bool = False

    def wait_s(self, batch: int, step_s: float) -> float:
        """How long ranks wait for the samples of a step."""
        loading_s = batch / self.samples_per_s if self.samples_per_s else 0.0
        return loading_s if self.is_first else max(0.0, loading_s - step_s)


_NOT_MEASURED = Loading()


def helpful_changes(
    result: SearchResult, inputs: PlanningInputs, profiles: Profiles, loading: Loading = _NOT_MEASURED
) -> list[Change]:
    """The changes that make training faster, those with the largest gain first. Loading stays as slow as it is. A gain
    is that of the fastest plan with the change over the fastest plan without it, not over the plan that is ranked
    first, which may be preferred although it is a little slower."""

    def speed_of(batch: int, step_s: float) -> float:
        return batch / (step_s + loading.wait_s(batch, step_s))

    speed = speed_of(inputs.global_batch, min(priced.prediction.step_s for priced in result.ranked))
    is_searched = result.seconds <= _SEARCH_S
    found = []
    for words, other in _changes(inputs):
        steps = _ranked_steps(result, other, profiles)
        if is_searched:
            with suppress(InputError):  # no plan fits, or the batch cannot be divided
                steps.append(search_with_offload(replace(other, top=1), profiles).ranked[0].prediction.step_s)
        speedup = speed_of(other.global_batch, min(steps)) / speed if steps else 0.0
        if speedup > 1 + _LEAST_GAIN:
            found.append(Change(words, speedup, is_searched))
    return sorted(found, key=lambda change: -change.speedup)


def _changes(inputs: PlanningInputs) -> Iterator[tuple[str, PlanningInputs]]:
    cluster, batch = inputs.cluster, inputs.global_batch
    device = inputs.device.name
    yield f"twice the batch, {2 * batch}", replace(inputs, global_batch=2 * batch)
    if inputs.allow != "changes" and "numerics.precision" not in inputs.constraints.fixed:
        yield "allow: changes, so that the plan may compute in a lower precision", replace(inputs, allow="changes")
    yield f"devices that compute twice as fast as {device}", replace(inputs, cluster=changed(cluster, "compute=2x"))
    yield f"devices with twice the memory of {device}", replace(inputs, cluster=changed(cluster, "memory=2x"))
    if cluster.device_count > 1:
        yield "links within a machine twice as fast", replace(inputs, cluster=changed(cluster, "within=2x"))
    if sum(node.number for node in cluster.nodes) > 1:
        yield "a network between machines twice as fast", replace(inputs, cluster=changed(cluster, "link=2x"))
    if inputs.constraints:
        yield f"no constraints ({inputs.constraints.describe()})", unconstrained(inputs)


def _ranked_steps(result: SearchResult, other: PlanningInputs, profiles: Profiles) -> list[float]:
    """The steps of the ranked plans with other inputs. Plans that do not fit are left out."""
    priced = (priced_again(plan, other, profiles) for plan in result.ranked[:_MOST_CHANGES])
    return [plan.prediction.step_s for plan in priced if plan is not None]


def answer_bottleneck(
    result: SearchResult, inputs: PlanningInputs, profiles: Profiles, loading: Loading = _NOT_MEASURED
) -> Answer:
    """Answers whether the job runs on the cluster, what it needs and what limits it."""
    best = result.ranked[0]
    step_s, plan = best.prediction.step_s, best.plan
    loader_s = loading.wait_s(inputs.global_batch, step_s)
    profile = profiles.get(plan.numerics.precision, plan.memory.recompute)
    limits = limits_of(best, profile, inputs, loader_s)
    whole_s = sum(limits.values()) or 1.0
    changes = helpful_changes(result, inputs, profiles, loading)
    speedup = (step_s + loader_s) / step_s
    if speedup > 1 + _LEAST_GAIN:
        changes.append(Change("loading that keeps up: more data.workers, or smaller files", speedup, True))
    changes = sorted(changes, key=lambda change: -change.speedup)[:_MOST_CHANGES]
    rows = tuple(
        (_NAMES[name], seconds_text(value), f"{value / whole_s:.0%}") for name, value in limits.items() if value > 0
    )
    first = next(iter(limits))
    sentences = [
        f"It runs on '{inputs.cluster.name}': {plan.summary()} is predicted to take {seconds_text(step_s)} a step"
        f" ({number_text(inputs.global_batch / (step_s + loader_s))} samples per second).",
        f"A device needs {bytes_text(best.needed_bytes)} of {bytes_text(inputs.device.memory_bytes)}.",
        f"What limits it is {_NAMES[first]}: {limits[first] / whole_s:.0%} of the step.",
    ]
    if loading.samples_per_s:
        waits = ", and ranks load a batch before they compute it" if loading.is_first else ""
        sentences.append(
            f"All ranks together load {number_text(loading.samples_per_s)} samples per second, and without loading"
            f" they would train {number_text(inputs.global_batch / step_s)}{waits}."
        )
    sentences += [
        f"{number}. {change.words}: {'' if change.is_searched else 'at least '}{change.speedup:.3g} times as many"
        " samples per second."
        for number, change in enumerate(changes, 1)
    ] or ["No single change that was tried makes it faster by more than 1%."]
    sentences += estimate_of([node.device for node in inputs.cluster.nodes])
    values = {
        "runs": True,
        "cluster": inputs.cluster.name,
        "plan": plan.model_dump(mode="json"),
        "summary": plan.summary(),
        "step_s": step_s,
        "device_bytes": best.needed_bytes,
        "bottleneck": first,
        "rows": [{"limit": name, "seconds": value, "share": value / whole_s} for name, value in limits.items()],
        "loader_samples_per_s": loading.samples_per_s,
        "changes": [{"change": c.words, "speedup": c.speedup, "is_searched": c.is_searched} for c in changes],
    }
    return Answer("bottleneck", ("what limits the step", "time", "share"), rows, tuple(sentences), values)


def refusal(problem: str, inputs: PlanningInputs) -> Answer:
    """The answer for a job that no plan can train on the cluster."""
    values = {"runs": False, "cluster": inputs.cluster.name, "problem": problem, "rows": [], "changes": []}
    return Answer("bottleneck", ("what limits the step", "time", "share"), (), (f"It does not run: {problem}",), values)
