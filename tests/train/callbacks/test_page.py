"""The code of docs/callbacks.md runs. Loggers that are not installed are replaced by objects that accept any call."""

import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from meshwright.job import Job, load_job, parse_job
from meshwright.train.callbacks.callbacks import build_callbacks
from meshwright.train.output.folder import read_result
from meshwright.user.call import Call
from meshwright.zoo.job_text import job_text
from tests.ranks import RankPool
from tests.train.loops.test_readme import code_blocks
from tests.train.one_process import EVALUATED, toy_job, train
from tests.zoo_models.configs import write_config

PAGE = "docs/callbacks.md"
PART = "tests.train.callbacks.test_page:"
CLASSES = ("StopWhenLow", "WandB", "MLflow", "Aim", "Generate", "GenerateWithTransformers")


def written(folder: Path) -> Path:
    """A file with all classes of the page."""
    blocks = code_blocks(PAGE, "python")
    assert len(blocks) == len(CLASSES)
    file = folder / "page.py"
    file.write_text("\n\n".join(blocks))
    return file


def test_the_callbacks_of_the_first_example_are_built(tmp_path: Path) -> None:
    (example,) = code_blocks(PAGE, "yaml")
    callbacks = yaml.safe_load(example)["callbacks"]
    callbacks[1]["call"] = f"{written(tmp_path)}:WandB"
    assert [type(c.object).__name__ for c in build_callbacks(toy_job(callbacks=callbacks))] == [
        "EarlyStopping",
        "WandB",
    ]


def test_the_own_rule_stops_the_run(tmp_path: Path) -> None:
    trainer = train(toy_job(callbacks=[{"call": f"{written(tmp_path)}:StopWhenLow", "loss": 1.55}]), tmp_path / "run")
    result = read_result(trainer.folder)
    assert result is not None
    assert result["steps"] < 10
    assert result["stopped"].startswith(f"the loss of step {result['steps']} is 1.")


@pytest.mark.parametrize(
    ("name", "package", "options", "logged"),
    [
        ("WandB", "wandb", {"project": "digits"}, lambda wandb: wandb.init.return_value.log),
        ("MLflow", "mlflow", {}, lambda mlflow: mlflow.log_metric),
        ("Aim", "aim", {}, lambda aim: aim.Run.return_value.track),
    ],
)
def test_loggers_get_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str, options: dict[str, Any], logged: Any
) -> None:
    stand_in = MagicMock()
    monkeypatch.setitem(sys.modules, package, stand_in)
    train(toy_job(**EVALUATED, callbacks=[{"call": f"{written(tmp_path)}:{name}", **options}]), tmp_path / "run")
    steps = [call.kwargs["step"] for call in logged(stand_in).call_args_list]
    assert set(steps) == set(range(1, 11))
    assert steps == sorted(steps), "some loggers drop what comes out of order"


# ---- text generation


class Bigrams(nn.Module):
    """Predicts the next token of 8 from the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 16)
        self.head = nn.Linear(16, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.embedding(tokens))
        return scores


def sentences(size: int = 40) -> Dataset[Any]:
    """Tokens that count up, and begin again after 7."""
    tokens = (torch.arange(size)[:, None] + torch.arange(7)) % 8
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def next_token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def generating_job(file: Path, axes: dict[str, int]) -> Job:
    data = {"call": f"{PART}sentences"}
    return parse_job(
        {
            "model": {"call": f"{PART}Bigrams"},
            "data": {"train": data, "eval": data},
            "loss": {"call": f"{PART}next_token_loss"},
            "optimizer": {"call": "torch.optim:AdamW", "lr": 0.1},
            "train": {"epochs": 3, "global_batch": 8},
            "log": {"tensorboard": False},
            "plan": {"axes": axes},
            "callbacks": [{"call": f"{file}:Generate", "prompt": [3, 4], "tokens": 6}],
        }
    )


def generate(rank: int, size: int, file: Path, axes: dict[str, int], folder: Path) -> None:
    train(generating_job(file, axes), folder, rank=rank, size=size)


def last_text(folder: Path) -> str:
    return (folder / "generated.txt").read_text().splitlines()[-1]


@pytest.mark.soak
def test_text_is_generated_on_one_rank_and_under_shards_and_splits(tmp_path: Path, two: RankPool) -> None:
    file = written(tmp_path)
    generate(0, 1, file, {}, tmp_path / "alone")
    assert last_text(tmp_path / "alone") == "step 15: [3, 4, 5, 6, 7, 0, 1, 2]"
    for axis in ("shard", "tensor"):
        two.run(generate, file, {axis: 2}, tmp_path / axis)
        assert last_text(tmp_path / axis) == last_text(tmp_path / "alone")


# ---- text generation by a model of transformers


def gpt2_job(file: Path, config: Path, plan: dict[str, Any], everywhere: bool) -> Job:
    settings = ["train.steps=2", "train.global_batch=4", "data.train.samples=8", "data.eval.samples=2"]
    settings += ["log.tensorboard=false", "checkpoint.every_steps=null", f"plan={plan}"]
    job = load_job("job", settings, job_text(f"hf:{config}"))
    name = "GenerateWithTransformers" if everywhere else "OnFirstRank"
    callback = {"call": f"{file}:{name}", "prompt": [3, 4, 5], "tokens": 5}
    return job.model_copy(update={"callbacks": [Call.model_validate(callback)]})


def generate_with_gpt2(
    rank: int, size: int, file: Path, config: Path, plan: dict[str, Any], folder: Path, everywhere: bool = True
) -> None:
    train(gpt2_job(file, config, plan, everywhere), folder, rank=rank, size=size)


@pytest.mark.parametrize(
    ("axis", "everywhere"),
    [("replicate", False), ("shard", True), pytest.param("tensor", True, marks=pytest.mark.soak)],
)
def test_gpt2_generates_under_plans_what_it_generates_alone(
    tmp_path: Path, two: RankPool, axis: str, everywhere: bool
) -> None:
    file, config = written(tmp_path), write_config(tmp_path, "gpt2")
    file.write_text(f"{file.read_text()}\n\nclass OnFirstRank(GenerateWithTransformers):\n    every_rank = False\n")
    generate_with_gpt2(0, 1, file, config, {"axes": {}}, tmp_path / "alone")
    assert last_text(tmp_path / "alone").startswith("step 2: [3, 4, 5, ")
    two.run(generate_with_gpt2, file, config, {"axes": {axis: 2}}, tmp_path / "run", everywhere)
    assert last_text(tmp_path / "run") == last_text(tmp_path / "alone")
