"""`MeshwrightTrainer` refuses a plan that trains another model before its first step, and `auto` takes another plan."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="transformers' Trainer needs the package accelerate: pip install accelerate")

from meshwright.errors import UnequalPlan
from meshwright.plan import Plan
from tests.compat.transformers.trainers import Texts, launched, make_model, make_trainer
from tests.proof.before_training.models import scale_gradients_of_divided_models
from tests.ranks import RankPool


def train_faulty(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Trains under tensor 2, whose gradients are wrong, as a given plan and as the fastest plan of a search."""
    from meshwright.compat.transformers import trainer as door

    fastest_first = [Plan.model_validate({"axes": axes}) for axes in ({"tensor": 2}, {"replicate": 2})]

    def best_plan(*args: Any, check: Any, **options: Any) -> Plan:
        for plan in fastest_first:
            try:
                check(plan)
                return plan
            except door.InputError:
                continue
        raise AssertionError

    seen: dict[str, Any] = {}
    with launched(rank, size), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", f"{folder}/cache")
        scale_gradients_of_divided_models(patch)
        patch.setattr(door, "best_plan", best_plan)
        trainer = make_trainer(make_model("llama"), fastest_first[0], folder, Texts(16), max_steps=2)
        try:
            trainer.train()
        except UnequalPlan as error:
            seen["refused"] = str(error)
        seen["steps"] = trainer.state.global_step
        trainer = make_trainer(make_model("llama"), "auto", folder, Texts(16), max_steps=2)
        trainer.train()
        seen["auto"] = trainer.plan.summary(), trainer.state.global_step
    return seen


def test_an_unequal_plan_is_refused_and_auto_takes_another(two: RankPool, tmp_path: Path) -> None:
    for seen in two.run(train_faulty, str(tmp_path)):
        assert "the plan (tensor 2 · fp32) does not train the same model as one device" in seen["refused"]
        assert "scaled" in seen["refused"]
        assert seen["steps"] == 0
        assert seen["auto"] == ("replicate 2 · fp32", 2)
