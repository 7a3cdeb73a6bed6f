"""The search for the fastest plans. A plan fits if it needs no more memory than a plan may use of a device. Ranked
plans are the fastest simulated plans that fit, after the best plan. A family is all plans with the same axes.

    excluded    candidates with a lower bound of memory above the capacity of a device (bounds.py)
    axes        of each way to divide the devices, in the order of a guess of its step: the largest microbatches that
                fit at each level of recomputation, with the fields of `compute` that are mostly the fastest, and of
                these and smaller ones the fastest (polish/descent.py). Skipped if a lower bound of the step is longer
                than the fastest plan; the search ends when the guess is `_GUESS_TOLERANCE` times as long, or after
                `_MOST_AXES` of them. Of those that differ only in how shards and replicas share data ranks, the one
                with the fastest guess is searched
    plain       plain replicas, shards at each level, and replicas of shards within a node are always searched, with all
                fields but their axes: they are what a person compares with
    branches    the best guess of each family that places branches on different ranks is always searched, for up to
                `_MOST_PLACED_FAMILIES` families, because the guess does not take into account that the ranks of such a
                plan launch fewer operators
    fewer       as long as half of the GPUs could be faster, because they do not compute for longer, they are searched
    polish      from the fastest points, each field and pairs of fields are changed to their neighbours until nothing is
                faster (polish/neighbours.py)
    preference  the best plan is the fastest one, or a simpler one (preference.py)

All times are for the same global batch, so the fastest step is the best plan.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from meshwright.errors import InputError
from meshwright.planner.bounds import BoundCalculator
from meshwright.planner.candidates import (
    RECOMPUTES,
    AxisSizes,
    Candidate,
    candidate_series,
    plan_of,
    possible_axis_sizes,
)
from meshwright.planner.compute_variants import traits_of
from meshwright.planner.constraints.apply import bounds_hold
from meshwright.planner.constraints.contradictions import check_inputs, check_model
from meshwright.planner.explanation.no_plan import describe_closest
from meshwright.planner.inputs import NoPlanFits, PlanningInputs
from meshwright.planner.polish.descent import Bounded, Descent
from meshwright.planner.polish.neighbours import Neighbours
from meshwright.planner.polish.point import NEVER_S, Point, Prices
from meshwright.planner.preference import preferred
from meshwright.planner.profiles import Profiles
from meshwright.planner.search_result import BoundedPlan, ExcludedPlan, PricedPlan, SearchResult, evenly
from meshwright.planner.summarize import summarize_model
from meshwright.planner.unequal.shards import capacity_for_states

# Limits of the search, chosen to keep it short. They decide which candidates are simulated, and change no prediction.
_MOST_AXES = 8
_MOST_PLACED_FAMILIES = 6
_MOST_EXPLAINED_FAMILIES = 2  # families that are searched only to say why they were not chosen
_MOST_POLISHED = 3
_POLISHED_WITHIN = 1.3  # points are polished if they are at most so many times as slow as the fastest
_GUESS_TOLERANCE = 1.3
_AS_FAST = 5e-4  # a difference of two steps that is called none
_FASTER_ON_FEWER = 0.97  # a plan that leaves half of the GPUs unused has to be faster by 3%


@dataclass
class _PlanSearch:
    """The state of the search in one precision.

    points               the fastest point that was found for each way to divide the devices
    accepted_placements  by placement of branches, whether the executor accepts it
    too_large            candidates that their memory bound excludes, with their bounds
    refusal              why the executor, or a constraint, has refused a candidate
    """

    inputs: PlanningInputs
    prices: Prices
    calculator: BoundCalculator
    points: dict[AxisSizes, Point | None] = field(default_factory=dict)
    accepted_placements: dict[tuple[Any, ...], bool] = field(default_factory=dict)
    too_large: Bounded = field(default_factory=list)
    refusal: str = ""

    def fits(self, priced: PricedPlan) -> bool:
        return self.inputs.fits(priced.prediction)

    def best_of_candidates(self) -> list[PricedPlan]:
        """The fastest plan of each simulated candidate that fits, the fastest first; then those that do not fit."""
        bests: dict[Candidate, PricedPlan] = {}
        for priced in sorted(self.prices.priced.values(), key=_order_of(self.inputs)):
            bests.setdefault(priced.candidate, priced)
        return list(bests.values())

    def point_of(self, priced: PricedPlan) -> Point:
        return next(point for point, other in self.prices.priced.items() if other is priced)

    def ranked(self) -> list[PricedPlan]:
        return [priced for priced in self.best_of_candidates() if self.fits(priced)]


def _order_of(inputs: PlanningInputs) -> Any:
    return lambda priced: (not inputs.fits(priced.prediction), priced.prediction.step_s)


def _step_s(priced: PricedPlan) -> float:
    return priced.prediction.step_s


def _preferred(plans: Sequence[PricedPlan]) -> PricedPlan:
    return plans[preferred([(priced.plan, priced.prediction) for priced in plans])]


def search(inputs: PlanningInputs, profiles: Profiles) -> SearchResult:
    """Returns the best plans, the fastest first. Raises `NoPlanFits` if no plan fits. `family_bests`, `excluded` and
    `summary` are those of the precision of the best plan."""
    result = _search_on_all(inputs, profiles)
    while (fewer := _ranks_that_may_be_faster(result, inputs)) is not None:
        try:
            other = _search_on_all(replace(inputs, most_ranks=fewer), profiles)
        except InputError:  # the constraints, or those who run the plan, need more ranks
            break
        if _step_s(other.ranked[0]) > _FASTER_ON_FEWER * _step_s(result.ranked[0]):
            break
        result = replace(
            other,
            plain=result.plain,  # those of a person, who uses all devices
            candidate_count=result.candidate_count + other.candidate_count,
            priced_count=result.priced_count + other.priced_count,
            seconds=result.seconds + other.seconds,
        )
    return result


def _ranks_that_may_be_faster(result: SearchResult, inputs: PlanningInputs) -> int | None:
    """Half of the GPUs that the best plan uses, or a little more; None if they would compute for longer than this plan
    takes. CPU ranks share their cores, so that fewer of them leave no core unused."""
    best = result.ranked[0]
    ranks = 1 << max(0, (best.plan.world_size - 1).bit_length() - 1)
    computes_s = best.prediction.breakdown.get("compute", 0.0) * best.plan.world_size / ranks
    is_uniform_gpus = inputs.cluster.kind == "cuda" and inputs.cluster.is_uniform
    return ranks if is_uniform_gpus and best.plan.world_size > 1 and computes_s < _step_s(best) else None


def _search_on_all(inputs: PlanningInputs, profiles: Profiles) -> SearchResult:
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
    is_fastest = _step_s(best) <= (1 + _AS_FAST) * _step_s(ranked[0])
    without_offload = next((priced for priced in ranked if priced.plan.memory.offload == "none"), None)
    others = [priced for priced in ranked if priced.candidate != best.candidate]
    return replace(
        next(result for result in fitting if best in result.ranked),
        ranked=(best, *others[: inputs.top - 1]),
        fastest=best if is_fastest else ranked[0],
        without_offload=without_offload if best.plan.memory.offload != inputs.offload else None,
        candidate_count=sum(result.candidate_count for result in results),
        priced_count=sum(result.priced_count for result in results),
        simulated=tuple(priced for result in results for priced in result.simulated),
        not_simulated=evenly([bounded for result in results for bounded in result.not_simulated]),
        seconds=perf_counter() - begin,
    )


def _search_precision(inputs: PlanningInputs, profiles: Profiles, precision: str) -> SearchResult:
    summary = summarize_model(inputs, profiles, precision)
    check_model(inputs, summary)
    prices = Prices(inputs, profiles, summary)
    state = _PlanSearch(inputs, prices, BoundCalculator(summary, inputs))
    bounded, excluded, count = _candidates(state, precision)
    by_sizes: dict[AxisSizes, Bounded] = {}
    for item in sorted(bounded, key=lambda item: (item[1].guess_s, RECOMPUTES.index(item[0].recompute))):
        by_sizes.setdefault(item[0].sizes, []).append(item)
    traits = traits_of(summary.profile)
    neighbours = Neighbours(summary, inputs, traits, list(by_sizes), lambda point: prices.plan(point) is not None)
    descent = Descent(prices, neighbours, bounds_hold(inputs.constraints))
    plain = _search_plain(state, descent, by_sizes)
    _search_axes(state, descent, by_sizes)
    _search_placements(state, descent, by_sizes)
    _polish(state, descent)
    _search_missing(state, descent, by_sizes)
    _fill(state, descent, bounded)
    if ranked := state.ranked():
        prices.divide(state.point_of(ranked[0]))
        ranked = state.ranked()
        best = state.point_of(ranked[0])
        simple = prices.price(descent.simplified(best))
        ranked = [ranked[0], *([simple] if simple is not None and simple is not ranked[0] else []), *ranked[1:]]
    simulated = state.best_of_candidates()
    known = {priced.candidate for priced in simulated}
    others = evenly([item for item in (*bounded, *state.too_large) if item[0] not in known])
    return SearchResult(
        *(
            tuple(ranked),
            None,
            _family_bests(state, by_sizes, ranked),
            tuple(excluded),
            summary,
            count,
            len(simulated),
            0.0,
        ),
        simulated=tuple(simulated),
        not_simulated=tuple(BoundedPlan(candidate, b.guess_s, b.memory_bytes) for candidate, b in others),
        refusal=state.refusal,
        plain=tuple(plain),
    )


def _is_plain(sizes: AxisSizes) -> bool:
    """Whether the axes are replicas, shards, or both, as a person would write them."""
    is_divided = sizes.tensor * sizes.pipeline * sizes.context * sizes.expert > 1
    return not (is_divided or sizes.splits_wide_layers or sizes.placed_branches)


def _search_plain(state: _PlanSearch, descent: Descent, by_sizes: dict[AxisSizes, Bounded]) -> list[PricedPlan]:
    """Searches all plain plans, and returns the best of each kind: replicas, shards, replicas of shards."""
    bests: dict[tuple[str, ...], Point] = {}
    for sizes, bounded in by_sizes.items():
        if _is_plain(sizes) and (point := _search_sizes(state, descent, sizes, bounded)) is not None:
            known = bests.get(sizes.family)
            if known is None or state.prices.seconds(point) < state.prices.seconds(known):
                bests[sizes.family] = point
    polished = [state.prices.price(descent.descend(point, within=True)) for point in bests.values()]
    return [priced for priced in polished if priced is not None]


def _search_sizes(
    state: _PlanSearch, descent: Descent, sizes: AxisSizes, bounded: Bounded, limit_s: float = NEVER_S
) -> Point | None:
    if sizes not in state.points:
        state.points[sizes] = descent.fastest_of(bounded, limit_s)
    return state.points[sizes]


def _search_axes(state: _PlanSearch, descent: Descent, by_sizes: dict[AxisSizes, Bounded]) -> None:
    searched = 0
    shapes: set[tuple[Any, ...]] = set()
    for sizes, bounded in by_sizes.items():  # in the order of their guess
        if sizes.shape in shapes:  # the fastest of a shape leads to the others
            continue
        shapes.add(sizes.shape)
        fastest_s = min((state.prices.seconds(p) for p in state.points.values() if p is not None), default=NEVER_S)
        limit_s = fastest_s if descent.uses_bounds else NEVER_S
        if fastest_s < NEVER_S and (searched >= _MOST_AXES or bounded[0][1].guess_s > _GUESS_TOLERANCE * limit_s):
            return
        searched += sizes not in state.points
        _search_sizes(state, descent, sizes, bounded, limit_s)


def _search_placements(state: _PlanSearch, descent: Descent, by_sizes: dict[AxisSizes, Bounded]) -> None:
    families: dict[tuple[str, ...], AxisSizes] = {}
    for sizes in by_sizes:
        if sizes.placed_branches:
            families.setdefault(sizes.family, sizes)
    for sizes in list(families.values())[:_MOST_PLACED_FAMILIES]:
        _search_sizes(state, descent, sizes, by_sizes[sizes])


def _polish(state: _PlanSearch, descent: Descent) -> None:
    """Descends from the fastest points with different axes."""
    seconds = state.prices.seconds
    points = sorted((point for point in state.points.values() if point is not None), key=seconds)
    families: dict[tuple[str, ...], Point] = {}
    for point in points:
        families.setdefault(point.candidate.sizes.family, point)
    for point in list(families.values())[:_MOST_POLISHED]:
        if seconds(point) <= _POLISHED_WITHIN * seconds(points[0]):
            descent.descend(point)


def _search_missing(state: _PlanSearch, descent: Descent, by_sizes: dict[AxisSizes, Bounded]) -> None:
    """Searches a few families of which no plan was simulated yet, for the report to say why they were not chosen."""
    known = {priced.candidate.sizes.family for priced in state.prices.priced.values()}
    missing: dict[tuple[str, ...], AxisSizes] = {}
    for sizes in by_sizes:
        if sizes.family not in known and not sizes.placed_branches:
            missing.setdefault(sizes.family, sizes)
    for sizes in sorted(missing.values(), key=lambda sizes: max(1, len(sizes.family)))[:_MOST_EXPLAINED_FAMILIES]:
        _search_sizes(state, descent, sizes, by_sizes[sizes])


def _fill(state: _PlanSearch, descent: Descent, bounded: Bounded) -> None:
    """Simulates candidates in the order of their guess until as many fit as are wanted."""
    for candidate, _ in bounded:
        if len(state.ranked()) >= state.inputs.top:
            return
        point = descent.neighbours.usual(candidate)
        if state.prices.seconds(point) < NEVER_S:
            state.prices.fits(point)


def _candidates(state: _PlanSearch, precision: str) -> tuple[Bounded, list[ExcludedPlan], int]:
    """Returns the candidates that their memory bound does not exclude, with their bounds; for every family that has
    none left, the plan that needs the least memory; and the number of all candidates."""
    inputs, summary, calculator = state.inputs, state.prices.summary, state.calculator
    bounded: Bounded = []
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
    if candidate.sizes.pipeline > 1 and state.prices.summary.cuts(candidate.stages, candidate.recompute) is None:
        return False
    sizes = candidate.sizes
    key = sizes.placed_branches, sizes.tensor if sizes.splits_shared_layers else 0, candidate.recompute
    if sizes.placed_branches and key in state.accepted_placements:
        # Checking branches takes a while. Plans that are simulated are checked once more, each by itself.
        return state.accepted_placements[key]
    try:
        state.inputs.check_plan(plan_of(candidate, state.prices.summary, state.inputs))
    except InputError as error:
        state.refusal = state.refusal or str(error)
        state.accepted_placements[key] = False
        return False
    state.accepted_placements[key] = True
    return True


def _family_bests(
    state: _PlanSearch, by_sizes: Iterable[AxisSizes], ranked: Sequence[PricedPlan]
) -> tuple[PricedPlan, ...]:
    """The best simulated plan of every family: of the `ranked` ones, which fit, the preferred one, or if none fits, the
    plan that needs the least memory."""
    families: dict[tuple[str, ...], list[PricedPlan]] = {sizes.family: [] for sizes in by_sizes}
    too_large = (priced for priced in state.best_of_candidates() if not state.fits(priced))
    for priced in (*ranked, *too_large):
        families.setdefault(priced.candidate.sizes.family, []).append(priced)
    bests = []
    for plans in families.values():
        if fitting := [priced for priced in plans if state.fits(priced)]:
            bests.append(_preferred(fitting))
        elif plans:
            bests.append(min(plans, key=lambda priced: priced.needed_bytes))
    return tuple(bests)
