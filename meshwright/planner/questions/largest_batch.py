"""`ask batch`: the largest batch that fits under each plan without further microbatches, and which plan trains
most samples per second with it.

    batch     = data ranks × microbatches of the plan × samples of a microbatch
    largest   the most samples of a microbatch with which the predicted memory fits, by interpolation: memory grows
              about linearly with the samples of a microbatch                                         largest_samples
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from meshwright.errors import InputError
from meshwright.numbers.limits import LARGEST_COUNT
from meshwright.numbers.units import bytes_text, number_text, seconds_text
from meshwright.plan import Plan
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.profiles import Profiles
from meshwright.planner.questions.answer import Answer, estimate_of
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


def largest_samples(needed_bytes: Callable[[int], int], capacity_bytes: int, most: int = _MOST_SAMPLES) -> int:
    """The largest number of samples, up to `most`, that needs at most `capacity_bytes`; 0 if one sample needs more.
    More samples must not need fewer bytes. The next number to try is where a straight line through a number that fits
    and one that does not reaches the capacity, and then further and further beyond that, towards the other of the two;
    when they are as close, the middle between them."""
    fitting, fitting_bytes = 1, needed_bytes(1)
    if fitting_bytes > capacity_bytes or most == 1:
        return int(fitting_bytes <= capacity_bytes)
    too_many, too_many_bytes = most, needed_bytes(most)
    if too_many_bytes <= capacity_bytes:
        return most
    beyond, last_fits = 0, True
    while too_many - fitting > 1:
        share = (capacity_bytes - fitting_bytes) / (too_many_bytes - fitting_bytes)
        samples = fitting + int(share * (too_many - fitting)) + (beyond if last_fits else -beyond)
        if too_many - fitting <= 4 * beyond:
            samples = (fitting + too_many) // 2
        samples = min(max(samples, fitting + 1), too_many - 1)
        size = needed_bytes(samples)
        last_fits = size <= capacity_bytes
        if last_fits:
            fitting, fitting_bytes = samples, size
        else:
            too_many, too_many_bytes = samples, size
        beyond = max(1, 2 * beyond)
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
    """Plans of different kinds, without accumulation, those with the fastest steps first. Of plans that differ only in
    what their summary leaves out, such as the number of stages of a rank, the fastest."""
    unique: dict[str, Plan] = {}
    for priced in (*result.ranked, *sorted(result.simulated, key=lambda priced: priced.prediction.step_s)):
        memory = priced.plan.memory.model_copy(update={"accumulation": 1})
        plan = priced.plan.model_copy(update={"memory": memory})
        unique.setdefault(plan.summary(), plan)
    return list(unique.values())[:_MOST_PLANS]


def _largest(plan: Plan, inputs: PlanningInputs, profiles: Profiles) -> LargestBatch | None:
    profile = profiles.get(plan.numerics.precision, plan.memory.recompute)
    arguments = inputs.cluster, profile, plan
    most = min(_MOST_SAMPLES, LARGEST_COUNT // plan.batch_parts)

    def needed_bytes(samples: int) -> int:
        """Of the device with the least memory; another device that lacks bytes lacks as many there."""
        ranks = memory_by_device(*arguments, plan.batch_parts * samples, inputs.optimizer, inputs.runtime)
        return inputs.capacity_bytes + max(memory.device_bytes - inputs.capacity_of(device) for memory, device in ranks)

    samples = largest_samples(needed_bytes, inputs.capacity_bytes, most)
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
    columns = ("", "batch", "samples of a rank", "step", "samples/s", "memory", "plan")
    rows = tuple(
        (
            str(number),
            f"{batch.global_batch:,}" if batch.is_limited else f"≥ {batch.global_batch:,}",
            f"{batch.prediction.batch_per_rank:,}",
            seconds_text(batch.prediction.step_s),
            number_text(batch.samples_per_s),
            bytes_text(batch.prediction.memory.device_bytes),
            batch.plan.summary(),
        )
        for number, batch in enumerate(batches, 1)
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
        f" {number_text(fastest.samples_per_s)} samples per second."
    )
    if largest is not fastest:
        yield (
            f"The largest batch, {largest.global_batch:,}, fits under {largest.plan.summary()}, with"
            f" {number_text(largest.samples_per_s)} samples per second."
        )
    yield (
        "Each batch is the largest without accumulation; with memory.accumulation it can be any multiple of that. A"
        f" plan may use {bytes_text(inputs.capacity_bytes)} of one {inputs.device.name}."
    )
    if not all(batch.is_limited for batch in batches):
        yield f"≥: no more than {_MOST_SAMPLES:,} samples of a microbatch were tried, so that a larger batch may fit."
    samples = inputs.epoch_samples
    if samples is not None and fastest.global_batch > samples:
        yield f"The data set has {samples:,} samples, fewer than such a batch."
    yield from estimate_of([node.device for node in inputs.cluster.nodes])


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
