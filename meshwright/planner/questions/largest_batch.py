"""`plan --batch max`: the largest batch that fits under each plan without further microbatches, and which plan trains
most samples per second with it.

    batch     = data ranks × microbatches of the plan × samples of a microbatch
    largest   the most samples of a microbatch with which the predicted memory fits, by doubling and bisection: memory
              grows with the samples of a microbatch                                                  largest_samples
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from meshwright.errors import InputError
from meshwright.limits import LARGEST_COUNT
from meshwright.plan import Plan
from meshwright.planner.explanation.explain import gib, rate, seconds
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.profiles import Profiles
from meshwright.planner.questions.answer import Answer
from meshwright.planner.search_result import SearchResult
from meshwright.simulator.predict import Prediction, memory_by_device, predict_plan

_MOST_PLANS = 12
_MOST_SAMPLES = 2**20  # of a microbatch


@dataclass(frozen=True)
class LargestBatch:
    """A plan, the largest global batch that fits under it, and the prediction for that."""

    plan: Plan
    global_batch: int
    prediction: Prediction
    is_limited: bool  # a larger batch does not fit; False where no larger one was tried

    @property
    def samples_per_s(self) -> float:
        return self.global_batch / self.prediction.step_s


def largest_samples(fits: Callable[[int], bool], most: int = _MOST_SAMPLES) -> int:
    """The largest number of samples, up to `most`, that fits; 0 if one does not. What fits also fits with fewer."""
    if not fits(1):
        return 0
    fitting = 1
    while fitting < most and fits(min(2 * fitting, most)):
        fitting = min(2 * fitting, most)
    too_many = min(2 * fitting, most + 1)
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        fitting, too_many = (middle, too_many) if fits(middle) else (fitting, middle)
    return fitting


def largest_batches(result: SearchResult, inputs: PlanningInputs, profiles: Profiles) -> list[LargestBatch]:
    """The largest batch of each kind of plan that the search has simulated, the fastest per sample first."""
    found = []
    for plan in _plans(result):
        batch = _largest(plan, inputs, profiles)
        if batch is not None:
            found.append(batch)
    return sorted(found, key=lambda batch: -batch.samples_per_s)


def _plans(result: SearchResult) -> Iterable[Plan]:
    """Different plans, without accumulation, those with the fastest steps first."""
    unique: dict[str, Plan] = {}
    for priced in (*result.ranked, *sorted(result.simulated, key=lambda priced: priced.prediction.step_s)):
        memory = priced.plan.memory.model_copy(update={"accumulation": 1})
        plan = priced.plan.model_copy(update={"memory": memory})
        unique.setdefault(plan.to_yaml(), plan)
    return list(unique.values())[:_MOST_PLANS]


def _largest(plan: Plan, inputs: PlanningInputs, profiles: Profiles) -> LargestBatch | None:
    profile = profiles.get(plan.numerics.precision, plan.memory.recompute)
    arguments = inputs.cluster, profile, plan
    most = min(_MOST_SAMPLES, LARGEST_COUNT // plan.batch_parts)

    def fits(samples: int) -> bool:
        ranks = memory_by_device(*arguments, plan.batch_parts * samples, inputs.optimizer, inputs.runtime)
        return all(memory.device_bytes <= inputs.capacity_of(device) for memory, device in ranks)

    samples = largest_samples(fits, most)
    if not samples:
        return None
    batch = plan.batch_parts * samples
    try:
        prediction = predict_plan(*arguments, batch, inputs.optimizer, runtime=inputs.runtime)
    except InputError:
        return None
    return LargestBatch(plan, batch, prediction, samples < most)


def answer_largest_batch(result: SearchResult, inputs: PlanningInputs, profiles: Profiles) -> Answer:
    """Answers the question with the plans of a search for the job's own batch."""
    batches = largest_batches(result, inputs, profiles)
    columns = ("batch", "samples of a rank", "step", "samples/s", "memory", "plan")
    rows = tuple(
        (
            f"{batch.global_batch:,}" if batch.is_limited else f"≥ {batch.global_batch:,}",
            f"{batch.prediction.batch_per_rank:,}",
            seconds(batch.prediction.step_s),
            rate(batch.samples_per_s),
            gib(batch.prediction.memory.device_bytes),
            batch.plan.summary(),
        )
        for batch in batches
    )
    return Answer(
        "largest_batch", columns, rows, tuple(_sentences(batches, inputs)), {"rows": list(map(_row, batches))}
    )


def _sentences(batches: list[LargestBatch], inputs: PlanningInputs) -> Iterable[str]:
    if not batches:
        yield "No plan fits with one sample of a rank: --max-memory, --cluster or recomputation decide what does."
        return
    fastest, largest = batches[0], max(batches, key=lambda batch: batch.global_batch)
    yield (
        f"The fastest per sample is {fastest.plan.summary()} with a batch of {fastest.global_batch:,}:"
        f" {rate(fastest.samples_per_s)} samples per second."
    )
    if largest is not fastest:
        yield (
            f"The largest batch, {largest.global_batch:,}, fits under {largest.plan.summary()}, with"
            f" {rate(largest.samples_per_s)} samples per second."
        )
    yield (
        "Each batch is the largest without accumulation; with memory.accumulation it can be any multiple of that. A"
        f" plan may use {gib(inputs.capacity_bytes)} of one {inputs.device.name}."
    )


def _row(batch: LargestBatch) -> dict[str, Any]:
    return {
        "plan": batch.plan.model_dump(mode="json"),
        "summary": batch.plan.summary(),
        "global_batch": batch.global_batch,
        "is_limited": batch.is_limited,
        "step_s": batch.prediction.step_s,
        "samples_per_s": batch.samples_per_s,
        "device_bytes": batch.prediction.memory.device_bytes,
    }
