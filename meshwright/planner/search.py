"""The search for the fastest plans. Candidates are ordered by a guess of their step time and simulated in this order,
until a limit is reached or bounds exclude all remaining candidates. A plan fits if it needs no more memory than a plan
may use of a device. Ranked plans are the fastest simulated plans that fit, after the best plan. A family is all plans
with the same axes.

    order       by the guess (bounds.py), the fastest first
    excluded    candidates with a lower bound of memory above the capacity of a device, or with a lower bound of time
                above the slowest ranked plan
    skipped     candidates that differ from one that did not fit only by larger microbatches;
                candidates that differ from one that fit only by more recomputation, because they are slower;
                candidates that do not fit if they have temporary tensors as large as those of simulated plans
    branches    the candidate with the fastest guess of each family that places branches on different ranks is always
                simulated, for up to `_MOST_PLACED_FAMILIES` families, because the guess does not take into account that
                the ranks of such a plan launch fewer operators
    compute     of the best plans, and of the best plan of each family that is almost as fast, the variants of how a
                rank runs its operators are simulated (compute_variants.py)
    end         when the guess of the next candidate is more than `_GUESS_TOLERANCE` times as slow as the slowest ranked
                plan; or when `_MOST_PRICED` candidates were simulated and some fit; or when `_MOST_FITTING` fit. If
                more plans than that are wanted (`top`), so many are simulated

    preference  the best plan is the fastest one, or a simpler one of which the predictions cannot tell whether it is
                slower (preference.py). The fastest plan is therefore also simulated with as few microbatches and as
                little recomputation as fit

All times are for the same global batch, so the fastest step is the best plan.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from time import perf_counter
from typing import Any

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.planner.bounds import BoundCalculator, Bounds
from meshwright.planner.candidates import RECOMPUTES, Candidate, candidate_series, plan_of, possible_axis_sizes
from meshwright.planner.compute_variants import best_variant, traits_of, with_exchanges
from meshwright.planner.constraints.apply import applied, bounds_hold
from meshwright.planner.constraints.contradictions import check_inputs, check_model
from meshwright.planner.explanation.no_plan import describe_closest
from meshwright.planner.inputs import TOP, NoPlanFits, PlanningInputs, accept_every_plan
from meshwright.planner.model_summary import ModelSummary
from meshwright.planner.preference import preferred
from meshwright.planner.profiles import Profiles
from meshwright.planner.search_result import BoundedPlan, ExcludedPlan, PricedPlan, SearchResult, evenly
from meshwright.planner.summarize import summarize_model
from meshwright.planner.unequal.division import divided, divided_again
from meshwright.planner.unequal.shards import capacity_for_states
from meshwright.simulator.predict import Prediction, predict_plan

# Limits of the search, chosen to keep it short. They decide which candidates are simulated, and change no prediction.
_MOST_PRICED = 20
_MOST_FITTING = 10
_MOST_PLACED_FAMILIES = 6
_MOST_EXPLAINED_FAMILIES = 4  # families that are simulated only to say why they were not chosen
_MOST_VARIED = 3  # ranked plans for which the variants of their compute fields are simulated, too
_VARIED_FAMILIES_WITHIN = 1.5  # and the best plans of other families, if they are at most so many times as slow
_GUESS_TOLERANCE = 1.1
_SHARED_TEMPORARIES = 0.8  # other candidates are assumed to have this share of the smallest temporaries so far


@dataclass
class _PlanSearch:
    """The state of the search in one precision.

    priced                  the candidates that were simulated
    failed_recompute        levels of recomputation that the model cannot be traced with
    temporary_bytes         by level of recomputation, the fewest bytes of temporary tensors per sample in a simulated
                            plan, before division by the tensor axis
    smallest_not_fitting    by `Candidate.without_microbatch`, the smallest microbatch size that did not fit
    accepted_placements     by placement of branches, whether the executor accepts it
    too_large               candidates that their memory bound excludes, with their bounds
    refusal                 why the executor, or a constraint, has refused a candidate
    """

    inputs: PlanningInputs
    profiles: Profiles
    summary: ModelSummary
    calculator: BoundCalculator
    priced: dict[Candidate, PricedPlan] = field(default_factory=dict)
    failed_recompute: set[str] = field(default_factory=set)
    temporary_bytes: dict[str, float] = field(default_factory=dict)
    smallest_not_fitting: dict[tuple[Any, ...], float] = field(default_factory=dict)
    accepted_placements: dict[tuple[Any, ...], bool] = field(default_factory=dict)
    too_large: "_Bounded" = field(default_factory=list)
    refusal: str = ""

    def price(self, candidate: Candidate) -> PricedPlan | None:
        """Simulates the candidate. Returns None if the executor cannot run its plan, or if the model cannot be traced
        with its level of recomputation."""
        if candidate not in self.priced:
            try:
                plan = plan_of(candidate, self.summary, self.inputs)
                self.inputs.check_plan(plan)
            except InputError:
                return None
            inputs, recompute = self.inputs, candidate.recompute
            try:
                profile = self.profiles.get(candidate.precision, recompute)
            except InputError:
                if recompute == "none":
                    raise
                self.failed_recompute.add(recompute)  # some models cannot recompute their activations
                return None
            self.summary.add_profile(recompute, profile)
            plan = applied(with_exchanges(plan, profile, inputs.cluster, self.predict), inputs.constraints)
            best, even = divided(plan, inputs, self.predict, profile, self.summary)
            self.priced[candidate] = PricedPlan(candidate, *best, even=even)
            self._update_temporaries(self.priced[candidate])
        priced = self.priced[candidate]
        if not self.fits(priced):
            key, batch = candidate.without_microbatch, candidate.microbatch_samples
            self.smallest_not_fitting[key] = min(self.smallest_not_fitting.get(key, batch), batch)
        return priced

    def predict(self, plan: Plan) -> Prediction:
        inputs, profile = self.inputs, self.profiles.get(plan.numerics.precision, plan.memory.recompute)
        return predict_plan(
            inputs.cluster, profile, plan, inputs.global_batch, inputs.optimizer, runtime=inputs.runtime
        )

    def choose_compute(self, candidates: Iterable[Candidate]) -> None:
        """Replaces the plans of these candidates by the best of their variants (compute_variants.py)."""
        traits = traits_of(self.summary.profile)
        for candidate in candidates:
            plain = self.priced[candidate]
            best, fastest = best_variant(plain.plan, plain.prediction, self.inputs, self.predict, traits)
            before = plain if best[0] != plain.plan else None
            faster = fastest if fastest[1].step_s < best[1].step_s else None
            profile = self.profiles.get(candidate.precision, candidate.recompute)
            best, even = divided_again(best, plain.plan, plain.even, self.inputs, self.predict, profile)
            self.priced[candidate] = PricedPlan(candidate, *best, before, faster, even)

    def _update_temporaries(self, priced: PricedPlan) -> None:
        candidate = priced.candidate
        if candidate.sizes.placed_branches:
            return  # the ranks of such a plan do not divide the temporaries equally
        temporary = max(0.0, priced.needed_bytes - self.calculator.memory_floor(candidate))
        of_sample = temporary * candidate.activation_parts / candidate.microbatch_samples
        smallest = self.temporary_bytes.get(candidate.recompute, of_sample)
        self.temporary_bytes[candidate.recompute] = min(smallest, of_sample)

    def fits(self, priced: PricedPlan) -> bool:
        return self.inputs.fits(priced.prediction)

    def is_hopeless(self, candidate: Candidate) -> bool:
        """Whether simulating the candidate is useless: the model cannot be traced with its recomputation, it needs at
        least as much memory as a candidate that did not fit, its memory including expected temporaries exceeds the
        capacity, it recomputes more than an otherwise equal candidate that fits, or it accumulates needlessly."""
        if candidate.recompute in self.failed_recompute or self._accumulates_needlessly(candidate):
            return True
        batch = candidate.microbatch_samples
        if batch >= self.smallest_not_fitting.get(candidate.without_microbatch, batch + 1):
            return True
        has_branches = bool(candidate.sizes.placed_branches)
        of_sample = 0.0 if has_branches else self.temporary_bytes.get(candidate.recompute, 0.0)
        temporary = _SHARED_TEMPORARIES * of_sample * batch / candidate.activation_parts
        # Profiles that were traced in the meantime may have raised the floor.
        if self.calculator.memory_floor(candidate) + temporary > self.inputs.largest_capacity_bytes:
            return True
        faster = candidate.with_less_recompute
        while faster is not None:
            priced = self.priced.get(faster)
            if priced is not None and self.fits(priced):
                return True
            faster = faster.with_less_recompute
        return False

    def _accumulates_needlessly(self, candidate: Candidate) -> bool:
        """Whether CPU ranks would accumulate gradients although the whole batch fits. Predictions for CPUs do not count
        what each further microbatch costs the host, so that accumulation appears to be faster than it is."""
        if self.inputs.cluster.kind != "cpu" or candidate.sizes.pipeline > 1 or candidate.microbatches == 1:
            return False
        local_batch = -(-self.inputs.global_batch // candidate.sizes.data_ranks)
        for recompute in RECOMPUTES[: RECOMPUTES.index(candidate.recompute) + 1]:
            whole = replace(candidate, recompute=recompute, microbatches=1, microbatch_samples=local_batch)
            if not self.is_hopeless(whole) and (priced := self.price(whole)) is not None and self.fits(priced):
                return True
        return False

    def ranked(self) -> list[PricedPlan]:
        return sorted(filter(self.fits, self.priced.values()), key=_step_s)


def _step_s(priced: PricedPlan) -> float:
    return priced.prediction.step_s


def _preferred(plans: Sequence[PricedPlan]) -> PricedPlan:
    return plans[preferred([(priced.plan, priced.prediction) for priced in plans])]


def search(inputs: PlanningInputs, profiles: Profiles) -> SearchResult:
    """Returns the best plans, the fastest first. Raises `NoPlanFits` if no plan fits. `family_bests`, `excluded` and
    `summary` are those of the precision of the best plan."""
    begin = perf_counter()
    check_inputs(inputs)
    inputs = replace(inputs, compares_samples=inputs.compares_samples or profiles.compares_samples)
    if not inputs.cluster.is_uniform:
        inputs = replace(inputs, even_shares=False)  # any data ranks can divide a batch
    results = [_search_precision(inputs, profiles, precision) for precision in inputs.precisions_to_try()]
    fitting = [result for result in results if result.ranked]
    if not fitting:
        has_plans = any(result.family_bests or result.excluded for result in results)
        raise NoPlanFits(describe_closest(inputs, results), lacks_memory=has_plans)
    ranked = sorted((priced for result in fitting for priced in result.ranked), key=_step_s)
    best = _preferred(ranked)
    others = [priced for priced in ranked if priced is not best]
    return replace(
        next(result for result in fitting if best in result.ranked),
        ranked=(best, *others[: inputs.top - 1]),
        fastest=ranked[0],
        candidate_count=sum(result.candidate_count for result in results),
        priced_count=sum(result.priced_count for result in results),
        simulated=tuple(priced for result in results for priced in result.simulated),
        not_simulated=evenly([bounded for result in results for bounded in result.not_simulated]),
        seconds=perf_counter() - begin,
    )


def _search_precision(inputs: PlanningInputs, profiles: Profiles, precision: str) -> SearchResult:
    summary = summarize_model(inputs, profiles, precision)
    check_model(inputs, summary)
    state = _PlanSearch(inputs, profiles, summary, BoundCalculator(summary, inputs))
    bounded, excluded, count = _candidates(state, precision)
    is_bounded = bounds_hold(inputs.constraints)
    bounded.sort(key=lambda item: (item[1].guess_s, RECOMPUTES.index(item[0].recompute), item[1].memory_bytes))
    for candidate, bound in bounded:
        ranked = state.ranked()[: inputs.top]
        if len(ranked) == inputs.top and is_bounded:
            slowest_s = _step_s(ranked[-1])
            if bound.guess_s > _GUESS_TOLERANCE * slowest_s:
                break
            if bound.floor_s >= slowest_s:
                continue
        if not state.is_hopeless(candidate):
            state.price(candidate)
        most_priced, most_fitting = max(_MOST_PRICED, inputs.top), max(_MOST_FITTING, inputs.top)
        if ranked and (len(state.priced) >= most_priced or len(state.ranked()) >= most_fitting):
            break
    _price_placements(state, [candidate for candidate, _ in bounded if candidate.sizes.placed_branches])
    _price_simpler(state, {candidate for candidate, _ in bounded})
    family_bests = _family_bests(state, bounded)
    ranked = state.ranked()
    fast = [best for best in family_bests if ranked and _step_s(best) <= _VARIED_FAMILIES_WITHIN * _step_s(ranked[0])]
    most_varied = _MOST_VARIED if inputs.top <= TOP else inputs.top
    state.choose_compute({priced.candidate for priced in (*ranked[:most_varied], *fast) if state.fits(priced)})
    family_bests, ranked = _family_bests(state, bounded), state.ranked()
    others = evenly([item for item in (*bounded, *state.too_large) if item[0] not in state.priced])
    return SearchResult(
        *(tuple(ranked), None, family_bests, tuple(excluded), summary, count, len(state.priced), 0.0),
        simulated=tuple(state.priced.values()),
        not_simulated=tuple(BoundedPlan(candidate, b.guess_s, b.memory_bytes) for candidate, b in others),
        refusal=state.refusal,
    )


def _price_simpler(state: _PlanSearch, candidates: set[Candidate]) -> None:
    """Simulates the fastest plan with fewer microbatches and less recomputation, the simplest of `candidates` first,
    until one fits."""
    if not (ranked := state.ranked()) or ranked[0].candidate.sizes.pipeline > 1:
        return
    fastest = ranked[0].candidate
    similar = [
        candidate
        for candidate in candidates
        if candidate.sizes == fastest.sizes
        and candidate.microbatches <= fastest.microbatches
        and RECOMPUTES.index(candidate.recompute) <= RECOMPUTES.index(fastest.recompute)
    ]
    for candidate in sorted(similar, key=lambda c: (c.microbatches > 1, c.recompute != "none", -c.microbatch_samples)):
        if not state.is_hopeless(candidate) and (priced := state.price(candidate)) and state.fits(priced):
            return


def _price_placements(state: _PlanSearch, candidates: Iterable[Candidate]) -> None:
    """Simulates the first candidate of each family. `candidates` are those that place branches, in the order of their
    guess."""
    families: dict[tuple[str, ...], Candidate] = {}
    for candidate in candidates:
        if not state.is_hopeless(candidate):
            families.setdefault(candidate.sizes.family, candidate)
    for candidate in islice(families.values(), _MOST_PLACED_FAMILIES):
        state.price(candidate)


_Bounded = list[tuple[Candidate, Bounds]]


def _candidates(state: _PlanSearch, precision: str) -> tuple[_Bounded, list[ExcludedPlan], int]:
    """Returns the candidates that their memory bound does not exclude, with their bounds; for every family that has
    none left, the plan that needs the least memory; and the number of all candidates."""
    inputs, summary, calculator = state.inputs, state.summary, state.calculator
    bounded: _Bounded = []
    excluded: dict[tuple[str, ...], tuple[float, Candidate]] = {}
    count = 0

    def exclude(candidate: Candidate, needed_bytes: float) -> None:
        family = candidate.sizes.family
        if needed_bytes < excluded.get(family, (float("inf"),))[0]:
            excluded[family] = (needed_bytes, candidate)

    for sizes in possible_axis_sizes(summary, inputs):
        states_bytes = calculator.states_bytes(sizes)
        for series in candidate_series(summary, sizes, inputs, precision):
            if not series or not _is_accepted(state, series[0]):
                continue
            if states_bytes > capacity_for_states(sizes.axes, inputs):
                count += 1
                exclude(series[0], states_bytes)
                break
            for candidate in series:
                count += 1
                bound = calculator.bounds(candidate)
                if bound is None:
                    break
                if bound.memory_bytes > inputs.largest_capacity_bytes:
                    exclude(candidate, bound.memory_bytes)
                    state.too_large.append((candidate, bound))
                    break  # the next candidates of the series need more
                bounded.append((candidate, bound))
    families = {candidate.sizes.family for candidate, _ in bounded}
    excluded_plans = [
        ExcludedPlan(candidate, plan_of(candidate, summary, inputs), needed_bytes)
        for family, (needed_bytes, candidate) in excluded.items()
        if family not in families and calculator.bounds(candidate) is not None
    ]
    return bounded, excluded_plans, count


def _is_accepted(state: _PlanSearch, candidate: Candidate) -> bool:
    """Whether the executor accepts the candidate's plan. The result also applies to candidates that differ only in
    their microbatches."""
    if candidate.sizes.pipeline > 1 and state.summary.cuts(candidate.stages, candidate.recompute) is None:
        return False
    if state.inputs.check_plan is accept_every_plan:
        return True
    sizes = candidate.sizes
    key = sizes.placed_branches, sizes.tensor if sizes.splits_shared_layers else 0, candidate.recompute
    if sizes.placed_branches and key in state.accepted_placements:
        # Checking branches takes a while. Plans that are simulated are checked once more, each by itself.
        return state.accepted_placements[key]
    try:
        state.inputs.check_plan(plan_of(candidate, state.summary, state.inputs))
    except InputError as error:
        state.refusal = state.refusal or str(error)
        state.accepted_placements[key] = False
        return False
    state.accepted_placements[key] = True
    return True


def _family_bests(state: _PlanSearch, bounded: _Bounded) -> tuple[PricedPlan, ...]:
    """Returns the best simulated plan of every family, for the report to say why it was not chosen. A few families of
    which no plan was simulated yet are simulated for this purpose."""
    families: dict[tuple[str, ...], list[Candidate]] = {}
    for candidate, _ in bounded:
        families.setdefault(candidate.sizes.family, []).append(candidate)
    priced_families = {priced.candidate.sizes.family for priced in state.priced.values()}
    missing = [
        family
        for family, members in families.items()
        if family not in priced_families and not members[0].sizes.placed_branches
    ]
    missing.sort(key=lambda family: max(1, len(family)))  # the simplest first
    least = min((candidate.recompute for candidate, _ in bounded), key=RECOMPUTES.index, default="none")
    for family in missing[:_MOST_EXPLAINED_FAMILIES]:
        # No further profile is traced only to explain why a plan was not chosen.
        simple = (member for member in families[family] if member.recompute == least)
        member = next((member for member in simple if not state.is_hopeless(member)), None)
        if member is not None:
            state.price(member)
    bests = []
    for family in families:
        plans = [priced for priced in state.priced.values() if priced.candidate.sizes.family == family]
        fitting = [priced for priced in plans if state.fits(priced)]
        if fitting:
            bests.append(_preferred(fitting))
        elif plans:
            bests.append(min(plans, key=lambda priced: priced.needed_bytes))
    return tuple(bests)
