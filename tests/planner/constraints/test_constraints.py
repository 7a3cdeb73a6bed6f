"""Plans with constraints: every plan keeps them, none of the exhaustively simulated ones is better, and contradictions
are named before the search."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from meshwright.cluster.detect import find_cluster
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.plan_fields.constraints import FIELDS, Constraints, constraints_from_words, make_constraints
from meshwright.planner.candidates import RECOMPUTES, Candidate, candidate_series, plan_of, possible_axis_sizes
from meshwright.planner.compute_variants import best_variant, plan_that_fits, traits_of, with_exchanges
from meshwright.planner.constraints.apply import (
    applied,
    check_constraints,
    constrained,
    keeps_constraints,
    unconstrained,
)
from meshwright.planner.constraints.contradictions import no_plan_keeps
from meshwright.planner.constraints.missing_cuts import with_cuts
from meshwright.planner.explanation.constraint_cost import cost_sentences, cost_values
from meshwright.planner.explanation.report import predict_given_plan
from meshwright.planner.inputs import NoPlanFits, PlanningInputs
from meshwright.planner.model_summary import ModelSummary
from meshwright.planner.profiles import Profiles
from meshwright.planner.search import search
from meshwright.planner.summarize import summarize_model
from meshwright.simulator.predict import Prediction, predict_plan
from meshwright.workloads.text.decoder import Decoder, NextTokenLoss
from tests.planner.cases import ADAMW


@cache
def tiny_decoder() -> Profiles:
    with torch.device("meta"):
        model = Decoder(layers=3, hidden=512, heads=4, sequence=128, vocabulary=500, tied=False)
        tokens = torch.empty(2, 128, dtype=torch.long)
    return Profiles(model, (tokens, tokens), NextTokenLoss())


@cache
def layers() -> Profiles:
    """Layers without blocks that could be recomputed."""
    model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.ReLU())], nn.Linear(64, 8))
    return Profiles(model, (torch.zeros(2, 64), torch.zeros(2, dtype=torch.long)), F.cross_entropy)


def inputs_of(cluster: str = "4xA100-80GB", batch: int = 16, **options: Any) -> PlanningInputs:
    return PlanningInputs(find_cluster(cluster), batch, ADAMW, can_fuse_optimizer=True, **options)


def every_plan(inputs: PlanningInputs, profiles: Profiles) -> list[tuple[Plan, Prediction]]:
    """Simulates every candidate of the search, in full, and the variants of each; returns those that fit. A candidate
    that recomputes more than an otherwise equal one that fits is left out, as the search does: see docs/constraints.md
    for what this loses."""
    plans: list[tuple[Plan, Prediction]] = []
    fitting: set[Candidate] = set()

    def predict(plan: Plan) -> Prediction:
        profile = profiles.get(plan.numerics.precision, plan.memory.recompute)
        return predict_plan(
            inputs.cluster, profile, plan, inputs.global_batch, inputs.optimizer, runtime=inputs.runtime
        )

    for candidate, summary in every_candidate(inputs, profiles):
        less = candidate.with_less_recompute
        while less is not None and less not in fitting:
            less = less.with_less_recompute
        if less is not None:
            continue
        try:
            plan = plan_of(candidate, summary, inputs)
            inputs.check_plan(plan)
        except InputError:
            continue
        profile = profiles.get(candidate.precision, candidate.recompute)
        plan = applied(with_exchanges(plan, profile, inputs.cluster, lambda p: predict(p).step_s), inputs.constraints)
        plain = plan_that_fits(plan, inputs, predict, profile)
        if plain[1].memory.device_bytes <= inputs.capacity_bytes:
            fitting.add(candidate)
            plans.append(best_variant(*plain, inputs, predict, traits_of(profile)))
    return plans


def every_candidate(inputs: PlanningInputs, profiles: Profiles) -> Iterator[tuple[Candidate, ModelSummary]]:
    """Yields all candidates, those with the least recomputation first, and the summary of the model."""
    for precision in inputs.precisions_to_try():
        summary = summarize_model(inputs, profiles, precision)
        for sizes in possible_axis_sizes(summary, inputs):
            series = candidate_series(summary, sizes, inputs, precision)
            candidates = [candidate for some in series for candidate in some]
            for candidate in sorted(candidates, key=lambda candidate: RECOMPUTES.index(candidate.recompute)):
                if sizes.pipeline == 1 or summary.cuts(candidate.stages, candidate.recompute) is not None:
                    yield candidate, summary


FIXED: dict[str, list[Any]] = {
    "axes.replicate": [1, 2, 4],
    "axes.shard": [1, 2, 4],
    "axes.tensor": [1, 2, 4],
    "axes.pipeline": [1, 2, 4],
    "axes.context": [1, 2],
    "memory.recompute": ["none", "selective", "full"],
    "memory.sharding": ["optimizer", "gradients", "parameters"],
    "memory.accumulation": [1, 2, 4],
    "memory.offload": ["none", "optimizer"],
    "pipeline.schedule": ["gpipe", "1f1b", "zbv"],
    "pipeline.microbatches": [2, 4],
    "numerics.precision": ["bf16", "fp32"],
    "numerics.cast": ["operators", "weights"],
    "modules.sequence": [True, False],
    "gradients.algorithm": ["auto", "native"],
    "compute.compile": ["none", "blocks", "model"],
    "compute.cuda_graphs": [True, False],
    "compute.fused_optimizer": [True, False],
}
AVOIDED = (
    "pipeline",
    "tensor",
    "recompute",
    "compile",
    "pipeline.schedule=gpipe",
    "axes.shard=4",
    "memory.sharding=optimizer",
)


@st.composite
def some_constraints(draw: st.DrawFn) -> Constraints:
    names = draw(st.lists(st.sampled_from(sorted(FIXED)), max_size=3, unique=True))
    fix = {name: draw(st.sampled_from(FIXED[name])) for name in names}
    avoid = draw(st.lists(st.sampled_from(AVOIDED), max_size=1))
    memory = draw(st.sampled_from([None, None, "700MB", "1GB", "40GB"]))
    try:
        return make_constraints(fix, avoid, memory)
    except InputError:  # they contradict each other
        return make_constraints(fix, (), memory)


@cache
def free_plans(cluster: str, batch: int) -> list[tuple[Plan, Prediction]]:
    """Every plan of the space without constraints."""
    return every_plan(inputs_of(cluster, batch), tiny_decoder())


def check_search(constraints: Constraints, cluster: str, batch: int) -> None:
    """Checks the search under constraints, for as many plans as there are, against every plan of the space."""
    inputs, profiles = constrained(inputs_of(cluster, batch, top=10_000), constraints), tiny_decoder()
    try:
        result = search(inputs, profiles)
    except NoPlanFits:
        assert every_plan(inputs, profiles) == []
        return
    except InputError:  # a contradiction
        assert not any(keeps_constraints(plan, constraints) for plan, _ in free_plans(cluster, batch))
        return
    for priced in result.ranked:
        check_constraints(priced.plan, constraints)
        assert priced.needed_bytes <= (constraints.max_memory or inputs.capacity_bytes)
        Plan.model_validate(priced.plan.model_dump())
    assert result.fastest is not None
    possible = every_plan(inputs, profiles)
    shortest_s = min(prediction.step_s for _, prediction in possible)
    found_s = min(result.fastest.prediction.step_s, float("inf"))
    assert found_s <= (1 + 1e-9) * shortest_s, (constraints.describe(), result.fastest.plan.summary())


def test_plans_keep_constraints_and_none_is_better() -> None:
    check_search(
        make_constraints({"axes.tensor": 2, "memory.recompute": "none"}, ["pipeline"], "1GB"), "2xA100-80GB", 4
    )


@pytest.mark.soak
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(constraints=some_constraints())
def test_plans_keep_many_constraints_and_none_is_better(constraints: Constraints) -> None:
    check_search(constraints, "4xA100-80GB", 8)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"fix": ["axes.tensr=4"]}, "'axes.tensr' is no field of a plan: did you mean 'axes.tensor'?"),
        ({"fix": ["axes.tensor"]}, "--fix axes.tensor: write a field of a plan and its value"),
        ({"fix": ["axes.tensor=0"]}, "axes.tensor is 0: input should be greater than 0"),
        ({"fix": ["axes.tensor=2", "axes.tensor=4"]}, "axes.tensor is fixed to 2 and to 4: leave out one"),
        ({"fix": ["numerics.precision=fp32"], "precision": "bf16"}, "numerics.precision is fixed to fp32 and to bf16"),
        ({"precision": "auto"}, "numerics.precision is auto, which leaves it to the run"),
        (
            {"avoid": ["pipelin"]},
            "avoid: 'pipelin' is no axis or feature that a plan can do without: did you mean 'pipe",
        ),
        ({"avoid": ["memory.sharding"]}, "one value of a field is avoided with FIELD=VALUE"),
        ({"fix": ["axes.pipeline=2"], "avoid": ["pipeline"]}, "axes.pipeline is fixed to 2, but 'pipeline' is avoided"),
        ({"max_memory": "forty"}, "--max-memory is 'forty': write a size such as 40GB"),
        ({"max_memory": "0GB"}, "--max-memory is '0GB'"),
    ],
)
def test_words_that_contradict_each_other(words: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        constraints_from_words(**words)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"fix": ["axes.tensor=3"]}, "tensor(3), make 3 ranks, which do not divide the 4 devices of '4xA100-80GB'"),
        (
            {"fix": [f"axes.{axis}=1" for axis in ("replicate", "shard", "context", "tensor", "pipeline")]},
            "all axes are fixed, to one rank, which make 1 ranks, but '4xA100-80GB' has 4 devices",
        ),
        (
            {"fix": ["memory.accumulation=5"]},
            "5 microbatches, into which a batch of 16 samples cannot be divided equally",
        ),
        ({"fix": ["gradients.algorithm=ring"]}, "which combines gradients of CPU ranks, but '4xA100-80GB' has GPUs"),
        ({"fix": ["gradients.powersgd_rank=2", "axes.shard=4"]}, "gradients.powersgd_rank is 2, which works with"),
        ({"fix": ["pipeline.microbatches=4"], "avoid": ["pipeline"]}, "but there is no pipeline (axes.pipeline is 1)"),
    ],
)
def test_contradictions_to_the_cluster_are_named_before_the_model_is_traced(words: Any, message: str) -> None:
    inputs = constrained(inputs_of(), constraints_from_words(**words))
    with pytest.raises(InputError) as error:
        search(inputs, None)  # type: ignore[arg-type]
    assert message in str(error.value)


def test_an_exact_search_refuses_fields_that_change_the_result() -> None:
    inputs = constrained(inputs_of(allow="same"), constraints_from_words(precision="bf16"))
    with pytest.raises(InputError, match=r"numerics\.precision=bf16 is fixed, which changes the numerical result"):
        search(inputs, tiny_decoder())


@pytest.mark.parametrize(
    ("fix", "message"),
    [
        ({"axes.context": 2}, "axes.context is fixed to 2, but the model has no sequences"),
        ({"axes.expert": 2}, "axes.expert is fixed to 2 ranks, but the model has no experts"),
        ({"memory.recompute": "full"}, "the model has no equal blocks that could be recomputed"),
        ({"pipeline.cuts": ["9"]}, "pipeline.cuts: the model cannot be cut after '9': known are 0, 1"),
    ],
)
def test_contradictions_to_the_model(fix: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        search(constrained(inputs_of(), make_constraints(fix)), layers())
    assert message in str(error.value)


def test_what_constraints_cost_is_said() -> None:
    free_inputs = inputs_of()
    inputs = constrained(free_inputs, make_constraints({"axes.pipeline": 4, "memory.sharding": "optimizer"}))
    best = search(inputs, tiny_decoder()).ranked[0]
    free = search(unconstrained(inputs), tiny_decoder()).ranked[0]
    assert free.plan == search(free_inputs, tiny_decoder()).ranked[0].plan
    sentences = cost_sentences(inputs.constraints, best, free)
    slower = best.prediction.step_s / free.prediction.step_s - 1
    assert f"cost {slower:.1%}: the best plan without them, {free.plan.summary()}" in sentences[0]
    assert "memory.sharding has no effect in this plan, which has no shard axis" in sentences[1]
    assert cost_values(inputs.constraints, best, free)["cost"] == slower > 0


def test_a_given_pipeline_without_cuts_gets_them_found() -> None:
    inputs, plan = (
        inputs_of("2xA100-80GB"),
        Plan.model_validate({"axes": {"pipeline": 2}, "pipeline": {"microbatches": 4}}),
    )
    found = with_cuts(plan, summarize_model(inputs, tiny_decoder(), "fp32"))
    assert len(found.pipeline.cuts) == 1
    report = predict_given_plan(plan, inputs, tiny_decoder())
    assert report.ranked[0][0] == found
    fixed = search(constrained(inputs, make_constraints({"axes.pipeline": 2})), tiny_decoder()).ranked[0].plan
    assert fixed.axes.pipeline == 2
    assert fixed.pipeline.cuts


def test_constraints_of_the_command_line_replace_those_of_the_job() -> None:
    of_job = make_constraints({"axes": {"tensor": 2}, "memory.recompute": "none"}, ["pipeline"], "1GiB")
    both = of_job.with_others(constraints_from_words(["axes.pipeline=2"], ["tensor"], "2GiB"))
    assert both.fixed == {"axes.pipeline": 2, "axes.tensor": 1, "memory.recompute": "none"}
    assert both.max_memory == 2**31
    assert set(FIELDS) >= set(both.fixed)


def test_why_no_plan_keeps_constraints() -> None:
    free = inputs_of("2xA100-80GB", 16)
    assert no_plan_keeps(free) == "no plan can be run on '2xA100-80GB'"
    kept = constrained(free, make_constraints({"axes.shard": 2}))
    assert "not this one" in no_plan_keeps(kept, "not this one")


def test_limits_of_memory_are_limits_of_one_device() -> None:
    inputs = inputs_of()
    assert constrained(inputs, make_constraints(max_memory="1TB")).capacity_bytes == inputs.capacity_bytes
    with pytest.raises(
        NoPlanFits, match=r"a plan may use 9\.54 MiB of one A100-80GB \(max_memory\)\. .* raise max_memory"
    ):
        search(replace(constrained(inputs, make_constraints(max_memory="10MB"))), tiny_decoder())
