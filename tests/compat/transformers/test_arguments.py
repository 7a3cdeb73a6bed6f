"""Arguments of Trainer under `MeshwrightTrainer`: mapped to the plan, obeyed, or refused with one line."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="transformers' Trainer needs the package accelerate: pip install accelerate")

from meshwright.compat.transformers import trainer
from meshwright.errors import InputError
from meshwright.plan import Plan
from tests.compat.transformers.trainers import Texts, launched, make_model, make_trainer, train


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    ("plan", "options", "words"),
    [
        ({"axes": {"pipeline": 2}}, {}, "a pipeline needs session.step"),
        ({"axes": {"context": 2}}, {}, "axes.context is 2: choose a plan that divides no sequences"),
        ({"memory": {"accumulation": 2}}, {}, "give gradient_accumulation_steps"),
        ({"numerics": {"precision": "fp16"}}, {}, "choose bf16 or fp32"),
        ({"numerics": {"precision": "tf32"}}, {"bf16": True}, "leave bf16 out, as the plan decides it"),
        ({"memory": {"recompute": "full"}}, {"gradient_checkpointing": True}, "as gradient_checkpointing does"),
        (None, {"fp16": True}, "set bf16=True"),
        (None, {"torch_compile": True}, "set compute.compile of the plan"),
        (None, {"auto_find_batch_size": True}, "choose a per_device_train_batch_size"),
        (None, {"bf16_full_eval": True}, "the plan's precision"),
        (None, {"optim": "adalomo"}, "choose another optimizer"),
    ],
)
def test_what_is_not_offered_is_refused_with_one_line(plan: Any, options: Any, words: str, tmp_path: Path) -> None:
    with launched(0, 1), pytest.raises(InputError) as refusal:
        make_trainer(torch.nn.Linear(2, 2), plan, tmp_path, Texts(4), **options)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_bf16_is_the_precision_of_the_plan(tmp_path: Path) -> None:
    short = {"max_steps": 2}  # bf16 is slow on CPUs without instructions for it
    expected = train(0, 1, "llama", "trainer", str(tmp_path), options={"bf16": True, **short})
    assert train(0, 1, "llama", None, str(tmp_path), options={"bf16": True, **short}) == expected
    result = train(0, 1, "llama", {"numerics": {"precision": "bf16"}}, str(tmp_path), options=dict(short))
    assert result["losses"] == expected["losses"]


@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing_factor": 0.1},
        {"gradient_checkpointing": True},
        pytest.param({"optim": "adafactor"}, marks=pytest.mark.soak),
    ],
)
def test_other_arguments_do_what_they_do_in_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    expected = train(0, 1, "llama", "trainer", str(tmp_path), options=dict(options))
    assert train(0, 1, "llama", None, str(tmp_path), options=dict(options)) == expected


def test_the_users_optimizer_and_schedule(tmp_path: Path) -> None:
    results = []
    for plan in ("trainer", None):
        with launched(0, 1):
            model = make_model("llama")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
            schedule = torch.optim.lr_scheduler.SequentialLR(
                optimizer,
                [
                    torch.optim.lr_scheduler.ConstantLR(optimizer, 0.1),
                    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
                ],
                milestones=[3],
            )
            trained = make_trainer(model, plan, tmp_path, Texts(22), optimizers=(optimizer, schedule))
            trained.train()
            results.append([(e["loss"], e["learning_rate"]) for e in trained.state.log_history if "loss" in e])
    assert results[0] == results[1]
    assert len({rate for _, rate in results[0]}) > 3


def test_evaluations_before_the_training_and_a_second_training(tmp_path: Path) -> None:
    results = []
    for plan in ("trainer", None):
        with launched(0, 1):
            trained = make_trainer(make_model("llama"), plan, tmp_path, Texts(22), Texts(11, seed=7))
            before = trained.evaluate()["eval_loss"]
            trained.train()
            first = losses(trained)
            trained.train()
            results.append((before, first, losses(trained), trained.predict(Texts(5)).metrics["test_loss"]))
    assert results[0] == results[1]


def test_auto_asks_for_plans_that_trainer_can_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def best_plan(model: Any, sample: Any, **options: Any) -> Plan:
        asked.update(options, sample=sample)
        with pytest.raises(InputError):
            options["check"](Plan.model_validate({"axes": {"pipeline": 2}}))
        accumulating = Plan.model_validate({"memory": {"accumulation": 2}})
        options["check"](accumulating)  # the search accepts or refuses plans whatever they accumulate
        return accumulating

    monkeypatch.setattr(trainer, "best_plan", best_plan)
    with launched(0, 1):
        trained = make_trainer(
            make_model("llama"), "auto", tmp_path, Texts(22), gradient_accumulation_steps=2, bf16=True, max_steps=1
        )
        with pytest.raises(InputError, match="chosen when training"):
            _ = trained.plan
        trained.train()
    assert trained.plan.numerics.precision == "bf16"
    assert trained.plan.memory.accumulation == 1
    assert asked["global_batch"] == 4
    assert len(asked["sample"]["input_ids"]) == 4
    assert isinstance(asked["optimizer"], torch.optim.Optimizer)


@pytest.mark.soak
def test_auto_chooses_a_plan_for_trainers_default_optimizer(tmp_path: Path) -> None:
    with launched(0, 1):
        trained = make_trainer(make_model("llama"), "auto", tmp_path, Texts(22), max_steps=2)
        trained.train()
    assert isinstance(trained.optimizer.optimizer, torch.optim.AdamW)
    assert trained.optimizer.param_groups[0]["fused"]
    assert trained.plan.world_size == 1
