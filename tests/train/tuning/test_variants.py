"""Which variant is taken: the fastest of those that compute the same and are measured within the budget."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from meshwright.plan import Plan
from meshwright.train.tuning.variants import (
    Choice,
    Timing,
    Variant,
    default_budget_s,
    expected_compile_s,
    fastest_variant,
    kept_plan,
    variant_names,
)


def plan_with(precision: str = "fp32", **compute: Any) -> Plan:
    return Plan.model_validate({"numerics": {"precision": precision}, "compute": compute})


EAGER, FUSED, GRAPHS = plan_with(), plan_with(fused_optimizer=True), plan_with(cuda_graphs=True)
COMPILED, BOTH = plan_with(compile="model"), plan_with(compile="model", cuda_graphs=True)
LOSSES = (2.0, 1.9, 1.8)


class Measurements:
    """Stands in for the ranks: has the timings of each plan, and notes what was measured within which limit. A timing
    with CUDA graphs contains the one without, which comes first in `timings`."""

    def __init__(self, timings: Sequence[tuple[Plan, Timing | list[Timing]]]) -> None:
        self.timings = list(timings)
        self.measured: list[Plan] = []
        self.limits: list[float] = []
        self.spreads: list[bool] = []

    def __call__(self, plan: Plan, limit_s: float, finds_spread: bool) -> list[Timing]:
        self.measured.append(plan)
        self.limits.append(limit_s)
        self.spreads.append(finds_spread)
        timing = next(timing for known, timing in self.timings if known == plan)
        timings = timing if isinstance(timing, list) else [timing]
        plain = plan.model_copy(update={"compute": plan.compute.model_copy(update={"cuda_graphs": False})})
        without = next((timing for known, timing in self.timings if known == plain != plan), None)
        if without is None:
            return timings
        before = without if isinstance(without, list) else [without]
        return [
            replace(both, uncaptured_s=one.step_s, losses=one.losses) for both, one in zip(timings, before, strict=True)
        ]


def ms(step_ms: float, seconds: float = 2.0, losses: tuple[float, ...] = LOSSES) -> Timing:
    return Timing(seconds, step_ms / 1e3, losses)


def choose(
    timings: Sequence[tuple[Plan, Timing | list[Timing]]],
    *,
    found: Plan = EAGER,
    budget_s: float = 60.0,
    compile_s: float = 10.0,
    predicted_s: dict[int, float] | None = None,
) -> tuple[Choice, list[str], Measurements]:
    """Chooses among the plans; `predicted_s` has the predictions by their number."""
    lines: list[str] = []
    measure = Measurements(timings)
    variants = [Variant(plan, (predicted_s or {}).get(number)) for number, (plan, _) in enumerate(timings)]
    return fastest_variant(found, variants, measure, budget_s, compile_s, lines.append), lines, measure


def test_the_fastest_variant_is_taken_and_the_line_says_what_was_measured() -> None:
    choice, lines, measure = choose([(EAGER, ms(18.2)), (GRAPHS, ms(15)), (COMPILED, ms(12)), (BOTH, ms(11.4, 25.0))])
    assert choice.plan == BOTH
    assert choice.line == (
        "measured 4 variants in 27 s: compiled with CUDA graphs 11.4 ms, compiled 12 ms, CUDA graphs 15 ms,"
        " eager 18.2 ms"
    )
    assert choice.is_complete
    assert not lines
    assert measure.measured == [GRAPHS, BOTH], "steps are timed before they are captured"
    assert measure.limits == [60, 58], "what was spent is left out of the limit of the next"


def test_a_step_that_cannot_be_captured_is_taken_without_graphs() -> None:
    failed = Timing(2.0, failure="the step cannot be captured")
    choice, lines, _ = choose([(EAGER, ms(9)), (GRAPHS, failed), (COMPILED, ms(12))])
    assert choice.plan == EAGER
    assert lines == ["CUDA graphs is left out: the step cannot be captured"]
    choice, lines, _ = choose([(COMPILED, ms(9)), (BOTH, replace(ms(8), step_s=None))])
    assert choice.plan == COMPILED, "the budget has ended before it was captured"
    assert not choice.is_complete


@pytest.mark.parametrize(("replayed", "plan"), [((2.0, 2.001), GRAPHS), ((2.0, 1.9), EAGER)])
def test_a_replayed_step_computes_the_same(replayed: tuple[float, float], plan: Plan) -> None:
    choice, lines, _ = choose([(EAGER, ms(9)), (GRAPHS, replace(ms(5), replayed=replayed))])
    assert choice.plan == plan
    expected = "CUDA graphs is left out: the loss of a replayed step is 2, and 1.9 without CUDA graphs"
    assert lines == ([] if plan == GRAPHS else [expected])


def test_of_equally_fast_variants_the_first_is_taken() -> None:
    choice, _, _ = choose([(EAGER, ms(10.03)), (COMPILED, ms(10))])
    assert choice.plan == EAGER
    assert choose([(EAGER, ms(10.1)), (COMPILED, ms(10))])[0].plan == COMPILED


def test_the_slowest_rank_decides() -> None:
    choice, _, _ = choose([(EAGER, [ms(10), ms(10)]), (COMPILED, [ms(5), ms(12)])])
    assert choice.plan == EAGER


def test_a_variant_that_fails_on_one_rank_is_left_out() -> None:
    failed = Timing(1.0, failure="CUDA out of memory")
    choice, lines, _ = choose([(EAGER, [ms(10), ms(10)]), (COMPILED, [ms(5), failed])])
    assert choice.plan == EAGER
    assert lines == ["compiled is left out: CUDA out of memory (rank 1)"]
    assert choice.is_complete, "a longer budget would not change it"


def test_where_everything_fails_predictions_decide() -> None:
    failed = Timing(0.5, failure="no deepcopy")
    choice, lines, measure = choose([(EAGER, failed), (FUSED, failed), (COMPILED, failed)], found=FUSED)
    assert choice.plan == FUSED
    assert len(lines) == len(measure.measured) == 2, "the same failure twice would be that of all"
    assert choice.line == "no variant could be measured in 1 s, predictions decide"


# ---- losses


@pytest.mark.parametrize(
    ("precision", "losses", "is_taken"),
    [
        ("fp32", (2.0001, 1.9, 1.8), True),
        ("fp32", (2.01, 1.9, 1.8), False),
        ("bf16", (2.01, 1.9, 1.8), True),
        ("bf16", (2.2, 1.9, 1.8), False),
        ("fp32", (2.0, 1.905, 1.8), True),  # after an update of the weights
        ("fp32", (2.0, 2.0, 2.0), False),  # nothing is learned
        ("fp32", (math.nan, 1.9, 1.8), False),
    ],
)
def test_a_variant_whose_losses_differ_is_left_out(precision: str, losses: tuple[float, ...], is_taken: bool) -> None:
    eager, compiled = plan_with(precision), plan_with(precision, compile="model")
    choice, lines, _ = choose([(eager, ms(10)), (compiled, ms(5, losses=losses))], found=eager)
    assert choice.plan == (compiled if is_taken else eager)
    assert len(lines) == (not is_taken)
    if not is_taken:
        assert lines[0].startswith("compiled is left out: its loss in step ")


def test_losses_may_differ_as_those_of_other_random_numbers_do() -> None:
    eager = replace(ms(10), spread=0.01)
    assert choose([(EAGER, eager), (COMPILED, ms(5, losses=(2.03, 1.9, 1.8)))])[0].plan == COMPILED
    assert choose([(EAGER, eager), (COMPILED, ms(5, losses=(2.06, 1.9, 1.8)))])[0].plan == EAGER


def test_by_how_much_losses_differ_is_found_in_the_first_variant_that_can_be_timed() -> None:
    timings = [(EAGER, Timing(1.0, failure="no memory")), (FUSED, ms(9)), (COMPILED, ms(9))]
    assert choose(timings)[2].spreads == [True, True, False]


def test_losses_that_are_not_finite_in_eager_steps_are_not_compared() -> None:
    nan = (math.nan, math.nan, math.nan)
    assert choose([(EAGER, ms(10, losses=nan)), (COMPILED, ms(5, losses=nan))])[0].plan == COMPILED


# ---- the budget


def test_compiling_that_does_not_fit_into_the_budget_is_not_begun() -> None:
    timings = [(EAGER, ms(10)), (COMPILED, ms(5))]
    choice, _, measure = choose(timings, budget_s=10, compile_s=20)
    assert measure.measured == [EAGER]
    assert choice.plan == EAGER, "without a prediction, what was measured decides"
    assert not choice.is_complete
    assert choose(timings, budget_s=10, compile_s=12)[0].plan == COMPILED


@pytest.mark.parametrize(("compiled_s", "is_taken"), [(0.008, True), (0.012, False)])
@pytest.mark.parametrize("is_begun", [True, False])
def test_beyond_the_budget_the_compiled_model_is_taken_if_predictions_prefer_it(
    compiled_s: float, is_taken: bool, is_begun: bool
) -> None:
    timings = [(EAGER, ms(10)), (COMPILED, Timing(60.0))]
    options = {"compile_s": 10.0 if is_begun else 200.0, "predicted_s": {0: 0.010, 1: compiled_s}}
    choice, _, measure = choose(timings, **options)  # type: ignore[arg-type]
    assert (COMPILED in measure.measured) == is_begun
    assert choice.plan == (COMPILED if is_taken else EAGER)
    assert choice.line.endswith("taken, as predictions prefer it") == is_taken


@pytest.mark.parametrize(("captured_s", "is_captured"), [(0.006, True), (0.008, False)])
def test_beyond_the_budget_predictions_decide_on_cuda_graphs_and_eager_steps_on_the_optimizer(
    captured_s: float, is_captured: bool
) -> None:
    timings = [(EAGER, ms(10)), (FUSED, ms(9)), (COMPILED, Timing()), (BOTH, Timing(60.0))]
    predicted_s = {0: 0.010, 1: 0.010, 2: 0.008, 3: captured_s}
    choice, _, measure = choose(timings, predicted_s=predicted_s)
    assert measure.measured == [EAGER, FUSED, BOTH], "compiling has used up the budget"
    assert choice.plan == plan_with(compile="model", cuda_graphs=is_captured, fused_optimizer=True)
    name = "compiled with CUDA graphs" if is_captured else "compiled"
    assert choice.line.endswith(f"; {name} is beyond the budget and taken, as predictions prefer it")


def test_cuda_graphs_beyond_the_budget_are_taken_only_if_predictions_prefer_them_to_what_was_measured() -> None:
    timings = [(EAGER, ms(9)), (COMPILED, ms(8)), (BOTH, replace(ms(8), step_s=None))]
    assert choose(timings, predicted_s={0: 0.010, 1: 0.008, 2: 0.006})[0].plan == BOTH
    assert choose(timings, predicted_s={0: 0.010, 1: 0.008, 2: 0.008})[0].plan == COMPILED


def test_a_compiled_model_that_failed_is_not_taken() -> None:
    timings = [(EAGER, ms(10)), (COMPILED, Timing(5.0, failure="no triton"))]
    assert choose(timings, predicted_s={0: 0.01, 1: 0.005})[0].plan == EAGER


@pytest.mark.parametrize(("found", "taken"), [(BOTH, COMPILED), (GRAPHS, GRAPHS), (EAGER, EAGER)])
def test_without_a_budget_the_compiled_model_is_taken_if_the_search_compiles(found: Plan, taken: Plan) -> None:
    """Without predictions, CUDA graphs are not preferred."""
    choice, lines, measure = choose([(EAGER, ms(1)), (COMPILED, ms(1)), (BOTH, ms(1))], found=found, budget_s=0.5)
    assert choice.plan == taken
    assert not measure.measured
    assert not lines
    assert not choice.is_measured
    changed = "the budget is too small to time variants: compiled, as predictions prefer"
    assert choice.line == (changed if found != taken else "")


def test_the_default_is_60_s_and_at_most_5_percent_of_the_run() -> None:
    assert default_budget_s(1_000, 0.1) == pytest.approx(5)
    assert default_budget_s(100_000, 0.1) == 60
    assert default_budget_s(None, 0.1) == default_budget_s(1_000, None) == 60


def test_larger_models_are_expected_to_compile_longer() -> None:
    layers = [nn.Linear(1, 1) for _ in range(100)]
    assert expected_compile_s(nn.Sequential(*layers)) > 2 * expected_compile_s(layers[0])


# ---- combinations


def test_a_compiled_variant_is_also_measured_with_the_kernels_that_were_fastest_in_eager_steps() -> None:
    combined = plan_with(compile="model", fused_optimizer=True)
    timings = [(EAGER, ms(10)), (FUSED, ms(9)), (COMPILED, ms(5)), (combined, ms(4))]
    lines: list[str] = []
    measure = Measurements(timings)
    variants = [Variant(plan) for plan, _ in timings[:3]]
    choice = fastest_variant(EAGER, variants, measure, 60, 1, lines.append)
    assert choice.plan == combined
    assert "compiled and fused optimizer 4 ms" in choice.line
    nnpack = plan_with(convolutions="nnpack")
    timings = [(EAGER, ms(10)), (nnpack, ms(9)), (COMPILED, ms(5))]
    _, _, measure = choose(timings)
    assert measure.measured == [EAGER, nnpack, COMPILED], "NNPACK's convolutions are not compiled"


def test_variants_are_named_by_what_differs() -> None:
    layout = plan_with(layout="channels_last", compile="blocks", cuda_graphs=True)
    names = ["eager", "eager and fused optimizer", "CUDA graphs", "compiled"]
    assert variant_names([EAGER, FUSED, GRAPHS, COMPILED]) == names
    assert variant_names([EAGER, layout]) == ["eager", "compiled blocks with CUDA graphs and channels_last"]
    assert variant_names([FUSED, FUSED]) == ["eager", "eager"]


def test_a_kept_choice_must_still_be_one_of_the_variants() -> None:
    variants = [Variant(EAGER), Variant(FUSED), Variant(COMPILED)]
    combined = plan_with(compile="model", fused_optimizer=True)
    assert kept_plan(EAGER, variants, combined.compute) == combined
    assert kept_plan(EAGER, variants, GRAPHS.compute) is None
