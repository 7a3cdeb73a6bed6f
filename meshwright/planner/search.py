"""Which plan to train with: candidates are ordered by a guess, and priced until bounds exclude all that are left.

    order       by guess (prune.py)
    excluded    memory floor above what a device can hold; time floor above the slowest plan that is kept
    skipped     larger microbatches, or less computed again, of what did not fit;
                more computed again of what did: it could only be slower
                what would not fit with the temporaries that like plans turned out to have
    besides     the best guess of each family that places branches, `_PLACED` at most: a guess does not know that their
                hosts start less
    stop        when even `_DOUBT` times less than the guess is slower than what is kept, or `_PRICED` were priced
                of which some fit, or `_FITTING` that do

Times are of the same global batch, so the fastest step is the best plan.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from time import perf_counter
from typing import Any

import torch
from torch import nn

from meshwright.calibrate.probe import measure
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find
from meshwright.errors import InputError
from meshwright.plan import Axes, Plan
from meshwright.planner.candidates import RECOMPUTES, Candidate, layouts, microbatches, plan_of
from meshwright.planner.outline import Outline
from meshwright.planner.placing import placeable
from meshwright.planner.profiles import Profiles
from meshwright.planner.prune import Bounder, Bounds
from meshwright.planner.question import Question, anything, with_own_operators
from meshwright.profile.optimizer import cost_of
from meshwright.profile.tracing.step import LossFunction
from meshwright.profile.values import ModelProfile
from meshwright.simulator.communication.combining import chosen_algorithm
from meshwright.simulator.communication.placement import group
from meshwright.simulator.predict import Prediction, predict_plan

_PRICED = 20
_FITTING = 10
_PLACED = 6
_TOLD = 4  # kinds of plans that are priced only to tell why they were not chosen
_DOUBT = 1.1
_SEEN = 0.8  # of the temporaries that priced plans had, what the others are taken to have too


@dataclass(frozen=True)
class Choice:
    """A candidate that was priced. It fits where `needs_bytes` is no more than may be filled of a device."""

    candidate: Candidate
    plan: Plan
    prediction: Prediction

    @property
    def needs_bytes(self) -> int:
        return self.prediction.memory.device_bytes


@dataclass(frozen=True)
class Excluded:
    """A candidate that a bound excluded: it needs that many bytes or more."""

    candidate: Candidate
    plan: Plan
    needs_bytes: float


@dataclass(frozen=True)
class Found:
    """`ranked` from the fastest on. `others` are the best of the families (by the axes they use) that the winner is not
    of, whether they fit or not, and `excluded` of those that no bound let through."""

    ranked: tuple[Choice, ...]
    others: tuple[Choice, ...]
    excluded: tuple[Excluded, ...]
    outline: Outline
    candidates: int
    priced: int
    seconds: float


@dataclass
class _Search:
    """What is known so far of one precision."""

    question: Question
    profiles: Profiles
    outline: Outline
    bounder: Bounder
    choices: dict[Candidate, Choice] = field(default_factory=dict)
    untraced: set[str] = field(default_factory=set)
    temporary: dict[str, float] = field(default_factory=dict)  # by recompute, the least that was seen of a sample
    least: dict[tuple[Any, ...], int] = field(default_factory=dict)  # by shape, the smallest that did not fit
    placing: dict[tuple[Any, ...], bool] = field(default_factory=dict)  # of branches, whether the runtime takes it

    def price(self, candidate: Candidate) -> Choice | None:
        """None where the runtime refuses the plan."""
        if candidate not in self.choices:
            plan = plan_of(candidate, self.outline, self.question)
            try:
                self.question.refuses(plan)
            except InputError:
                return None
            question, recompute = self.question, candidate.recompute
            try:
                profile = self.profiles.get(candidate.precision, recompute)
            except InputError:
                if recompute == "none":
                    raise
                self.untraced.add(recompute)  # some models cannot compute activations again
                return None
            self.outline.learn(recompute, profile)
            plan = combined(plan, profile, question.cluster)
            prediction = predict_plan(question.cluster, profile, plan, question.global_batch, question.optimizer)
            self.choices[candidate] = Choice(candidate, plan, prediction)
            self._see(self.choices[candidate])
        choice = self.choices[candidate]
        if not self.fits(choice):
            key = candidate.shape
            self.least[key] = min(self.least.get(key, candidate.batch), candidate.batch)
        return choice

    def _see(self, choice: Choice) -> None:
        candidate = choice.candidate
        if candidate.layout.apart:
            return  # its ranks do not divide the temporaries alike
        more = max(0.0, choice.needs_bytes - self.bounder.memory_floor(candidate))
        of_sample = more * candidate.layout.tensor / candidate.batch
        known = self.temporary.get(candidate.recompute, of_sample)
        self.temporary[candidate.recompute] = min(known, of_sample)

    def fits(self, choice: Choice) -> bool:
        return choice.needs_bytes <= self.question.capacity_bytes

    def hopeless(self, candidate: Candidate) -> bool:
        """It needs more than one that did not fit, or computes more again than one that did."""
        if candidate.recompute in self.untraced:
            return True
        if candidate.batch >= self.least.get(candidate.shape, candidate.batch + 1):
            return True
        of_sample = 0.0 if candidate.layout.apart else self.temporary.get(candidate.recompute, 0.0)
        seen = _SEEN * of_sample * candidate.batch / candidate.layout.tensor
        if self.bounder.memory_floor(candidate) + seen > self.question.capacity_bytes:  # now that more is known
            return True
        more = candidate.keeping_more
        while more is not None:
            known = self.choices.get(more)
            if known is not None and self.fits(known):
                return True
            more = more.keeping_more
        return False

    def ranked(self) -> list[Choice]:
        return sorted(filter(self.fits, self.choices.values()), key=lambda choice: choice.prediction.step_s)


def search(question: Question, profiles: Profiles) -> Found:
    """The best plans, fastest first. Raises an `InputError` where none fits."""
    begun = perf_counter()
    question = replace(question, joined=question.joined or hasattr(profiles.loss, "joined"))
    found = [_search(question, profiles, precision) for precision in question.precisions_to_try()]
    fitting = [one for one in found if one.ranked]
    if not fitting:
        raise InputError(_fits_not(question, found))
    best = min(fitting, key=lambda one: one.ranked[0].prediction.step_s)
    ranked = sorted((c for one in fitting for c in one.ranked), key=lambda choice: choice.prediction.step_s)
    return replace(
        best,
        ranked=tuple(ranked[: question.top]),
        candidates=sum(one.candidates for one in found),
        priced=sum(one.priced for one in found),
        seconds=perf_counter() - begun,
    )


def _search(question: Question, profiles: Profiles, precision: str) -> Found:
    outline = outline_of(question, profiles, precision)
    state = _Search(question, profiles, outline, Bounder(outline, question))
    todo, excluded, count = _candidates(state, precision)
    todo.sort(key=lambda item: (item[1].guess_s, RECOMPUTES.index(item[0].recompute), item[1].memory_bytes))
    for candidate, bound in todo:
        kept = state.ranked()[: question.top]
        if len(kept) == question.top:
            slowest = kept[-1].prediction.step_s
            if bound.guess_s > _DOUBT * slowest:
                break
            if bound.floor_s >= slowest:
                continue
        if not state.hopeless(candidate):
            state.price(candidate)
        if kept and (len(state.choices) >= _PRICED or len(state.ranked()) >= max(_FITTING, question.top)):
            break
    _place(state, [candidate for candidate, _ in todo if candidate.layout.apart])
    others, more = _others(state, todo, excluded)
    return Found(tuple(state.ranked()), others, more, outline, count, len(state.choices), 0.0)


def _place(state: _Search, candidates: Iterable[Candidate]) -> None:
    """Prices the first of each family."""
    families: dict[str, Candidate] = {}
    for candidate in candidates:
        if not state.hopeless(candidate):
            families.setdefault(candidate.layout.family, candidate)
    for candidate in islice(families.values(), _PLACED):
        state.price(candidate)


def outline_of(question: Question, profiles: Profiles, precision: str) -> Outline:
    profile = profiles.get(precision, "none")
    outline = Outline(profile, question.device, question.cluster.cores if question.cluster.kind == "cpu" else 1)
    if outline.has_convolutions and not question.exact:
        outline.layout = "channels_last"
    found = outline.structure
    if found is not None and found.branches:
        calls = profiles.calls(evaluating=found.evaluated)
        outline.placeable = placeable(found, profile.parameters, calls)
    return outline


_Bounded = list[tuple[Candidate, Bounds]]


def _candidates(state: _Search, precision: str) -> tuple[_Bounded, list[Excluded], int]:
    """What the bounds leave, the least demanding of what they exclude by its family, and how many there were."""
    question, outline, bounder = state.question, state.outline, state.bounder
    left: _Bounded = []
    excluded: dict[str, tuple[float, Candidate]] = {}
    count = 0

    def exclude(candidate: Candidate, needs: float) -> None:
        family = candidate.layout.family
        if needs < excluded.get(family, (float("inf"),))[0]:
            excluded[family] = (needs, candidate)

    for layout in layouts(outline, question):
        needs = bounder.states_bytes(layout)
        for growing in microbatches(outline, layout, question, precision):
            if not growing or not _is_run(state, growing[0]):
                continue
            if needs > question.capacity_bytes:
                count += 1
                exclude(growing[0], needs)
                break
            for candidate in growing:
                count += 1
                bound = bounder.bounds(candidate)
                if bound is None:
                    break
                if bound.memory_bytes > question.capacity_bytes:
                    exclude(candidate, bound.memory_bytes)
                    break  # larger ones need more
                left.append((candidate, bound))
    families = {candidate.layout.family for candidate, _ in left}
    gone = [
        Excluded(candidate, plan_of(candidate, outline, question), needs)
        for family, (needs, candidate) in excluded.items()
        if family not in families and bounder.bounds(candidate) is not None
    ]
    return left, gone, count


def _is_run(state: _Search, candidate: Candidate) -> bool:
    """Whether the runtime takes plans of this shape."""
    if candidate.layout.pipeline > 1 and state.outline.cuts(candidate.stages, candidate.recompute) is None:
        return False
    if state.question.refuses is anything:
        return True
    layout = candidate.layout
    key = layout.apart, layout.tensor if layout.beside else 0, candidate.recompute
    if layout.apart and key in state.placing:
        return state.placing[key]  # looking at branches takes a while; what is priced is asked for itself
    try:
        state.question.refuses(plan_of(candidate, state.outline, state.question))
    except InputError:
        state.placing[key] = False
        return False
    state.placing[key] = True
    return True


def _others(
    state: _Search, todo: _Bounded, excluded: list[Excluded]
) -> tuple[tuple[Choice, ...], tuple[Excluded, ...]]:
    """The best of every family, so that it can be said why it was not chosen."""
    families: dict[str, list[Candidate]] = {}
    for candidate, _ in todo:
        families.setdefault(candidate.layout.family, []).append(candidate)
    priced = {choice.candidate.layout.family for choice in state.choices.values()}
    missing = (family for family in families if family not in priced and not families[family][0].layout.apart)
    simple = sorted(missing, key=lambda family: family.count("×"))
    for family in simple[:_TOLD]:
        # No further profile is traced only to tell why something was not chosen.
        cheap = next((member for member in families[family] if member.recompute == "none"), None)
        if cheap is not None:
            state.price(cheap)
    best = []
    for family in families:
        own = [choice for choice in state.choices.values() if choice.candidate.layout.family == family]
        fitting = [choice for choice in own if state.fits(choice)]
        if fitting:
            best.append(min(fitting, key=lambda choice: choice.prediction.step_s))
        elif own:
            best.append(min(own, key=lambda choice: choice.needs_bytes))
    return tuple(best), tuple(excluded)


def combined(plan: Plan, profile: ModelProfile, cluster: Cluster) -> Plan:
    """With the algorithm that is predicted to combine its gradients fastest."""
    if plan.axes.replicate == 1 or cluster.kind != "cpu":
        return plan
    weights = sum(parameter.bytes for parameter in profile.parameters if parameter.trainable)
    bucket = min(plan.gradients.bucket_bytes, weights / plan.axes.shard / plan.axes.tensor / plan.axes.pipeline)
    algorithm = chosen_algorithm(bucket, group(plan.axes, ("replicate",), cluster), cluster)
    return plan.model_copy(update={"gradients": plan.gradients.model_copy(update={"algorithm": algorithm})})


def _fits_not(question: Question, found: Iterable[Found]) -> str:
    """By how much, and what would come closest."""
    options: list[tuple[float, Plan, str]] = []
    for one in found:
        options += [(choice.needs_bytes, choice.plan, "") for choice in one.others]
        options += [(gone.needs_bytes, gone.plan, "at least ") for gone in one.excluded]
    device = question.device
    if not options:
        return f"no plan can be run on '{question.cluster.name}'"
    needs, plan, least = min(options, key=lambda option: option[0])
    may, gib = question.capacity_bytes, 2**30
    return (
        f"the model fits no plan on '{question.cluster.name}': the closest, {plan.summary()}, needs {least}"
        f"{needs / gib:.1f} GiB of the {may / gib:.1f} GiB that may be filled of a {device.name}"
        f" ({device.memory_bytes / gib:.1f} GiB less {question.margin:.0%}), {(needs - may) / gib:.1f} GiB too much:"
        " use more or larger devices, or a smaller batch"
    )


def replicas(devices: int, global_batch: int) -> Plan:
    """The plan that needs no prediction: every device a replica, as far as the batch goes."""
    return Plan(axes=Axes(replicate=min(devices, global_batch)))


def best_plan(
    model: nn.Module,
    sample_batch: Any,
    *,
    global_batch: int,
    loss: LossFunction | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    cluster: str | Cluster = "local",
    exact: bool = False,
    target: str | None = None,
) -> Plan:
    """The fastest plan there is for this model. The model and the batch may lie on the meta device; `optimizer` is a
    template, plain SGD where it is left out. With `exact` the plan leaves the numbers as they are."""
    found = find(cluster, measure) if isinstance(cluster, str) else cluster
    on_gpu = found.kind == "cuda"
    profiles = Profiles(model, sample_batch, loss, target, on_gpu)
    question = with_own_operators(Question(found, global_batch, cost_of(optimizer, on_gpu), exact=exact), profiles)
    return search(question, profiles).ranked[0].plan
