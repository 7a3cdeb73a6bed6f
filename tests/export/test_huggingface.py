"""Models of transformers: from a folder with weights through training back to such a folder, with equal outputs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.errors import InputError
from meshwright.export import huggingface
from meshwright.export.export import export
from meshwright.export.run import read_run
from meshwright.files.weights_file import open_weights
from meshwright.job import load_job
from meshwright.plan import Plan
from meshwright.train.build import build_initialized_model
from meshwright.train.output.folder import RunFolder, write_job_and_plan
from meshwright.user.call import load
from meshwright.zoo.huggingface import build
from meshwright.zoo.job_text import job_text
from tests.export.runs import train_run
from tests.train.one_process import session_of, toy_job, train
from tests.zoo_models.configs import write_config

SETTINGS = ["train.steps=2", "train.global_batch=2", "checkpoint.every_steps=null", "log.tensorboard=false"]
SETTINGS += ["data.train.samples=4", "data.eval.samples=2"]


def save_pretrained(folder: Path, name: str, **options: Any) -> Path:
    """Writes a model with random weights, as transformers does it, and a tokenizer's file."""
    torch.manual_seed(5)
    saved = folder / f"{name}-saved"
    model: Any = build(str(write_config(folder, name)))
    model.config.use_cache = True  # which is off in training
    model.save_pretrained(str(saved), **options)
    (saved / "tokenizer_config.json").write_text("{}")
    return saved


def outputs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=torch.arange(12).reshape(2, 6)).logits
    return logits


def test_a_trained_llama_is_written_as_a_folder_with_equal_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_pretrained(tmp_path, "llama", max_shard_size="20KB")
    assert (source / "model.safetensors.index.json").exists()
    job = load_job("job", SETTINGS, job_text(f"hf:{source}"))
    llama: Any = load("transformers:LlamaForCausalLM")
    assert torch.equal(outputs(build_initialized_model(job)), outputs(llama.from_pretrained(str(source))))

    run = tmp_path / "run"
    trained = session_of(train(job, run)).state_dict()
    write_job_and_plan(RunFolder(run), job, Plan())
    monkeypatch.setattr(huggingface, "_LARGEST_FILE", "20KB")
    result = export(run, "huggingface", limit=2)
    assert result.file == run / "export" / f"{job.name}-huggingface"
    assert result.metrics["loss"].change == 0
    assert result.bytes > result.bytes_before
    assert not list(result.file.parent.glob(".new-*"))

    read: Any = llama.from_pretrained(str(result.file))
    assert all(torch.equal(value, trained[name]) for name, value in read.state_dict().items())
    expected = build_initialized_model(job)
    expected.load_state_dict(trained)
    assert torch.equal(outputs(read), outputs(expected))
    assert read.config.use_cache
    assert (result.file / "tokenizer_config.json").read_text() == "{}"
    assert json.loads((result.file / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert len(list(result.file.glob("*.safetensors"))) > 1
    assert export(run, "huggingface", limit=0).file == result.file  # replaces its own folder
    assert open_weights(result.file).shapes == {name: tuple(value.shape) for name, value in trained.items()}

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    with pytest.raises(InputError, match="it exists already: remove it, or name a folder that does not exist"):
        export(run, "huggingface", tmp_path / "full")
    assert read_run(run).step == 2


def test_other_models_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Net is no PreTrainedModel: use --to safetensors"):
        export(train_run(toy_job(), tmp_path / "run"), "huggingface")


def test_a_folder_that_transformers_cannot_read_back_is_named_in_one_line(tmp_path: Path) -> None:
    saved = save_pretrained(tmp_path, "gpt2")
    model = build(str(saved))
    (saved / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"gpt2-saved is written, but transformers cannot read it: ") as caught:
        huggingface.read_folder(model, saved)
    assert "\n" not in str(caught.value)
