"""One table decides which fields of a plan exclude each other: whoever asks about a plan gets the same answer in the
same words."""

import random
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from documentation.reference.rules import rules_page
from meshwright.cluster.detect import find_cluster
from meshwright.errors import InputError
from meshwright.job import load_plan
from meshwright.parallel.check import checker_of_plans
from meshwright.plan import Plan
from meshwright.plan_fields.constraints import FIELDS, make_constraints
from meshwright.plan_fields.effects import choice
from meshwright.plan_fields.groups import GROUPS, Axes
from meshwright.plan_rules import table
from meshwright.plan_rules.rule import FACTS, Rule, names_of
from meshwright.plan_rules.table import RULES, check_rules, refusal, rules_of
from meshwright.planner.constraints.apply import constrained
from meshwright.planner.constraints.contradictions import check_inputs
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.search import search
from meshwright.profile.structure.model_structure import ModelStructure
from meshwright.train.check import check_job, facts_of
from tests.planner.constraints.test_constraints import inputs_of, layers
from tests.planner.constraints.test_every_field import VALUES
from tests.train.one_process import toy_job

# Values of a plan's fields, besides the defaults.
CHOICES: dict[str, tuple[Any, ...]] = {
    **VALUES,
    "modules.splits": ({"0": {"kind": "row"}}, {"0": {"kind": "row", "axis": "replicate"}}),
    "modules.branches": ({"0": 1}, {"0": 3}),
    "pipeline.cuts": (["0"], ["0", "2"], ["0", "2", "4"]),
    "shares.samples": ([10, 6], [4, 4, 4, 4]),
}
OF_ROWS = {  # further values, which some row needs
    "axes.replicate": (2, 4, 60_000),
    "pipeline.microbatches": (2, 3, 5, 7),
    "numerics.precision": (*CHOICES["numerics.precision"], "auto"),
}
OF_DEVICES = ("has no instructions for it", "has no GPUs of NVIDIA or AMD")  # about a field and a device's abilities


def random_groups(draws: random.Random, choices: dict[str, tuple[Any, ...]], share: float) -> dict[str, dict[str, Any]]:
    """The groups of a plan in which about this share of the fields has another value than the default."""
    groups: dict[str, dict[str, Any]] = {}
    for name, values in choices.items():
        if draws.random() < share:
            group, field = name.split(".")
            groups.setdefault(group, {})[field] = draws.choice(values)
    return groups


def unchecked(groups: dict[str, dict[str, Any]]) -> Plan:
    """The plan, whether its fields agree or not."""
    values: dict[str, Any] = {name: kind.model_validate(groups.get(name, {})) for name, kind in GROUPS.items()}
    return Plan.model_construct(**values)


def words_of(check: Callable[..., Any], *arguments: Any) -> str | None:
    """What a check raises; None if it accepts."""
    try:
        check(*arguments)
    except InputError as error:
        return str(error)
    return None


@cache
def structure() -> ModelStructure:
    model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(20, 20), nn.ReLU())], nn.Linear(20, 5))
    return ModelStructure(model, torch.zeros(4, 20))


def fixing_all(plan: Plan, kind: str) -> PlanningInputs:
    """The inputs of a search in which all fields of the plan are fixed, on a cluster of its size."""
    fix = {f"{group}.{name}": value for group, fields in plan for name, value in fields}
    inputs = inputs_of(f"{plan.world_size}x{'H100' if kind == 'cuda' else 'EPYC-7763'}", 64 * plan.batch_parts)
    return constrained(inputs, make_constraints(fix))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_construction_fix_search_and_run_agree_about_random_plans(kind: str) -> None:
    draws, job = random.Random(45), toy_job()
    check = checker_of_plans(structure(), device=kind)
    constructed = refused = accepted = 0
    for _ in range(1000):
        groups = random_groups(draws, CHOICES, draws.choice([0.02, 0.05, 0.1, 0.2]))
        plan, inputs = unchecked(groups), fixing_all(unchecked(groups), kind)
        impossible = refusal(plan, "plan")
        cluster = f"'{inputs.cluster.name}'"
        reason = impossible or refusal(plan, "run", device=kind, cluster=cluster)
        # Construction
        made = words_of(load_plan, groups)
        assert (made is None) == (impossible is None)
        assert impossible is None or impossible in str(made)
        # --fix
        fixed = words_of(check_inputs, inputs)
        if fixed is None or not any(words in fixed for words in OF_DEVICES):
            assert fixed == (reason or refusal(plan, "fix", device=kind, cluster=cluster))
        if impossible is not None:
            continue
        constructed += 1
        # The check of a search, and that of a run
        words = words_of(check, plan)
        here = refusal(plan, "run", device=kind)
        assert here is None or words == here
        accepted += words is None
        if here is not None and kind == "cpu":
            refused += 1
            assert words_of(check_job, job, plan, find_cluster("8xcpu")) == here
    assert constructed > 300
    assert accepted > 100
    assert kind == "cuda" or refused > 50


@pytest.mark.parametrize("cluster", ["4xA100-80GB", "4xEPYC-7763"])
def test_no_search_offers_a_plan_that_a_run_refuses(cluster: str) -> None:
    draws, searches = random.Random(7), 0
    kind = find_cluster(cluster).kind
    inputs = inputs_of(cluster, check_plan=partial(check_rules, device=kind))
    for _ in range(40):
        groups = random_groups(draws, CHOICES, 0.05)
        fix = {f"{group}.{name}": value for group, fields in groups.items() for name, value in fields.items()}
        try:
            ranked = search(constrained(inputs, make_constraints(fix)), layers()).ranked
        except InputError:
            continue
        searches += 1
        for plan in (priced.plan for priced in ranked):
            assert refusal(plan, "run", device=kind) is None
            assert Plan.model_validate(plan.model_dump()) == plan
    assert searches > 10


FACTS_OF_A_ROW: dict[str, Any] = {
    "train": SimpleNamespace(on_nonfinite="rewind", on_spike="skip"),
    "checkpoint": SimpleNamespace(frozen=False),
    "partition": "sample",
    "routers": True,
    "loss": None,  # each kind of loss
    "arguments": SimpleNamespace(
        gradient_checkpointing=True, predict_with_generate=True, include_num_input_tokens_seen="all"
    ),
    "caller": "Trainer",
    "cluster": "'4xH100'",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.when)
def test_every_row_refuses_some_plan_and_names_values(rule: Rule) -> None:
    draws, choices = random.Random(1), {name: {**CHOICES, **OF_ROWS}[name] for name in sorted(rule.fields)}
    assert {*FACTS_OF_A_ROW, "device"} == set(FACTS)
    for _ in range(3000):
        plan = unchecked(random_groups(draws, choices, 0.7))
        for device, kind in (("cpu", "compares_samples"), ("cuda", "terms")):
            loss = SimpleNamespace(kind=kind, is_divisible=False)
            names = names_of(plan, {**FACTS_OF_A_ROW, "device": device, "loss": loss})
            if rule.refuses_all(names, rule.fields):
                assert "{" not in rule.message(names)
                return
    pytest.fail("no plan is refused")


class AxesWithX(Axes):
    x: int = choice(1, "same")


class PlanWithX(Plan):
    axes: AxesWithX = AxesWithX()


def test_a_new_field_is_refused_everywhere_by_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Rule("axes.x > 1 and memory.recompute == 'full'", "axes.x is {axes.x}, with which nothing is recomputed")
    monkeypatch.setattr(table, "RULES", (*RULES, row))
    monkeypatch.setitem(FIELDS, "axes.x", AxesWithX.model_fields["x"])
    monkeypatch.setitem(GROUPS, "axes", AxesWithX)
    rules_of.cache_clear()
    plan = PlanWithX.model_validate({"axes": {"x": 2}, "memory": {"recompute": "full"}})
    allowed = PlanWithX.model_validate({"axes": {"x": 2}})
    words = "axes.x is 2, with which nothing is recomputed"
    try:
        assert words_of(checker_of_plans(structure()), plan) == words
        assert words_of(checker_of_plans(structure()), allowed) is None
        assert words_of(check_job, toy_job(), plan, find_cluster("8xcpu")) == words
        fixed = constrained(inputs_of(), make_constraints({"axes.x": 2, "memory.recompute": "full"}))
        assert words_of(check_inputs, fixed) == words
        assert words_of(check_inputs, constrained(inputs_of(), make_constraints({"axes.x": 2}))) is None
        assert "`axes.x > 1 and memory.recompute == 'full'`" in rules_page()
    finally:
        monkeypatch.undo()
        rules_of.cache_clear()


def test_a_job_says_which_rules_hold() -> None:
    plan = Plan.model_validate({"axes": {"replicate": 2}, "gradients": {"servers": 1}})
    job = toy_job(checkpoint={"frozen": False})
    assert refusal(plan, "run") is None
    assert "checkpoint.frozen is false" in str(refusal(plan, "run", **facts_of(job)))
