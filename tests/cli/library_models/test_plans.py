"""Models of transformers and timm are planned for 8 GPUs by name, and as models without any loss."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import default_collate

import meshwright as mw
from meshwright.job import load_plan
from tests.cli.commands import RunCommand
from tests.proof.models.model_kinds import KINDS
from tests.proof.models.transformers_models import CASES, Samples
from tests.soaked import all_but
from tests.zoo_models.configs import CONFIGS, write_config

NAMES = [*(f"hf:{name}" for name in CONFIGS), "timm:resnet18", "timm:convnext_atto", "timm:vit_tiny_patch16_224"]
TIMM = [name for name in KINDS if name.startswith("timm")]


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_planned_by_name(folder: Path, run_command: RunCommand, name: str) -> None:
    source, _, model = name.partition(":")
    if source == "hf":
        name = f"hf:{write_config(folder, model)}"
    sizes = ["--sequence", "8"] if model == "t5" else []
    sizes += ["--image", "64"] if model in ("resnet18", "convnext_atto") else []
    words = ("--cluster", "8xH100", "--global-batch", "64", "--top", "1", "--output", "plan.yaml")
    result = run_command("plan", name, *sizes, *words)
    assert result.exit_code == 0, result.stderr
    assert load_plan("plan.yaml").world_size == 8


@pytest.mark.parametrize("name", all_but({"vit"}, CASES))
def test_a_model_is_planned_without_a_loss(name: str) -> None:
    data = Samples(CASES[name].samples)
    batch = default_collate([data[index] for index in range(7)])
    assert (batch["labels"] == -100).any()
    plan = mw.best_plan(CASES[name].build(), batch, global_batch=64, cluster="8xH100")
    assert plan.world_size == 8


@pytest.mark.soak
@pytest.mark.parametrize("name", TIMM)
def test_a_model_of_timm_is_planned(name: str) -> None:
    batch = default_collate([KINDS[name].data[0], KINDS[name].data[1]])
    model = KINDS[name].build()
    loss, optimizer = torch.nn.functional.cross_entropy, torch.optim.AdamW(model.parameters())
    plan = mw.best_plan(model, batch, loss=loss, optimizer=optimizer, global_batch=64, cluster="8xH100")
    assert plan.world_size == 8
