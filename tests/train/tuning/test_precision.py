"""`auto` chooses the precision that is measured to be the fastest, among those the hardware has instructions for."""

import pytest
import torch

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find_cluster
from meshwright.plan import Plan
from meshwright.train.tuning import precision
from meshwright.train.tuning.precision import choose_precision, instructions_for
from meshwright.train.tuning.processes import StepMeasurer
from meshwright.train.tuning.variants import Timing
from tests.train.one_process import toy_job

AUTO = Plan.model_validate({"axes": {"replicate": 2}, "numerics": {"precision": "auto"}})


def machine(*instructions: str) -> Cluster:
    cluster = find_cluster("2xcpu")
    node = cluster.nodes[0]
    device = node.device.model_copy(update={"instructions": instructions, "name": "Processor"})
    return cluster.model_copy(update={"nodes": (node.model_copy(update={"device": device}),)})


def test_without_instructions_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(precision, "StepMeasurer")
    choice = choose_precision(AUTO, toy_job(), machine("avx2-fp32"))
    assert choice.plan.numerics.precision == "fp32"
    assert choice.reason == "precision fp32: Processor has no instructions for bf16 or fp16"


@pytest.mark.parametrize(
    ("faster", "reason"),
    [
        ("bf16", "precision bf16 (amx-bf16): 1 ms a step, 2 ms in fp32"),
        ("fp32", "precision fp32: 1 ms a step, 2 ms in bf16"),
    ],
)
def test_the_fastest_precision_is_chosen(monkeypatch: pytest.MonkeyPatch, faster: str, reason: str) -> None:
    def measure(self: StepMeasurer, plan: Plan, limit_s: float) -> list[Timing]:
        return [Timing(1.0, 1e-3 if plan.numerics.precision == faster else 2e-3)]

    monkeypatch.setattr(StepMeasurer, "measure", measure)
    choice = choose_precision(AUTO, toy_job(), machine("amx-bf16", "amx-fp16"))
    assert choice.plan == AUTO.model_copy(update={"numerics": AUTO.numerics.model_copy(update={"precision": faster})})
    assert choice.reason == reason


def test_where_steps_cannot_be_measured_the_lowest_precision_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepMeasurer, "measure", lambda *_: [Timing(1.0, failure="out of memory")])
    choice = choose_precision(AUTO, toy_job(), machine("amx-bf16"))
    assert choice.plan.numerics.precision == "bf16"
    assert choice.reason == "precision bf16: steps cannot be measured on one device (out of memory)"


@pytest.mark.soak  # test_processes.py measures steps of a job in the same way
def test_steps_of_the_job_are_measured() -> None:
    before = torch.get_num_threads()
    choice = choose_precision(AUTO, toy_job(), machine("amx-bf16"))
    assert choice.plan.numerics.precision in ("fp32", "bf16")
    assert " ms a step, " in choice.reason
    assert torch.get_num_threads() == before


def test_a_plan_that_names_its_precision_is_unchanged() -> None:
    plan = Plan.model_validate({"numerics": {"precision": "fp16"}})
    assert choose_precision(plan, toy_job(), machine()).plan is plan


def test_instructions_are_named() -> None:
    device = machine("amx-bf16", "avx512_bf16-bf16").nodes[0].device
    assert instructions_for(device, "bf16") == "amx-bf16, avx512_bf16-bf16"
    assert instructions_for(device, "fp8") == "emulated: Processor has no instructions for fp8"
