"""A job that trains adapters of peft on a frozen model of transformers: it trains, resumes from small checkpoints, and
is exported as a folder of adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.reader import open_checkpoint
from meshwright.errors import CheckpointError
from meshwright.export.export import export
from meshwright.export.run import read_run
from meshwright.files.weights_file import open_weights
from meshwright.job import Job, load_job
from meshwright.plan import Plan
from meshwright.train.output.folder import RunFolder, write_job_and_plan
from meshwright.user.call import load
from meshwright.zoo.job_text import job_text
from tests.export.test_huggingface import SETTINGS, outputs, save_pretrained
from tests.train.one_process import equal_states, session_of, train
from tests.zoo_models.adapters import pretrained_with_lora

CALL = "tests.zoo_models.adapters:pretrained_with_lora"


def adapter_job(base: Path, *settings: str) -> Job:
    model = f"model={{call: '{CALL}', folder: '{base}'}}"
    own = [*SETTINGS, model, "train.weights=null", "checkpoint.frozen=false", "train.steps=4", *settings]
    return load_job("job", own, job_text(f"hf:{base}"))


def test_adapters_are_trained_saved_and_exported(tmp_path: Path) -> None:
    base = save_pretrained(tmp_path, "llama")
    job, run = adapter_job(base), tmp_path / "run"
    expected = session_of(train(job, tmp_path / "whole")).state_dict()
    train(job, run, stop_after=2)
    write_job_and_plan(RunFolder(run), job, Plan())
    session = session_of(train(job, run))
    assert equal_states(session.state_dict(), expected)
    initial = pretrained_with_lora(str(base))
    trained = {name for name, parameter in initial.named_parameters() if parameter.requires_grad}
    for name, value in initial.state_dict().items():
        if name not in trained:
            assert torch.equal(value, expected[name]), name
    assert trained
    held = {id(parameter) for group in session.optimizer.param_groups for parameter in group["params"]}
    assert held == {id(session.module.get_parameter(name)) for name in trained}

    checkpoint = max((run / "checkpoints").glob("step-*"))
    with open_checkpoint(checkpoint, read_manifest(checkpoint)) as reader:
        saved = {key.removeprefix("model/") for key in reader.tensors if key.startswith("model/")}
    assert saved == trained

    result = export(run, "huggingface", limit=2)
    assert result.metrics["loss"].change == 0
    assert sorted(path.name for path in result.file.glob("adapter*")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    llama = load("transformers:LlamaForCausalLM").from_pretrained(str(base))
    read: Any = load("peft:PeftModel").from_pretrained(llama, str(result.file))
    assert torch.equal(outputs(read), outputs(read_run(run).model))
    assert not torch.equal(outputs(read), outputs(initial))

    whole = export(run, "safetensors", limit=0)
    assert whole.file.stat().st_size > 5 * (result.file / "adapter_model.safetensors").stat().st_size
    assert set(open_weights(whole.file).shapes) == set(expected)

    other: Any = load("transformers:LlamaForCausalLM").from_pretrained(str(base))
    torch.nn.init.normal_(other.model.norm.weight)
    other.save_pretrained(str(base))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight of the model has other values than when it was"):
        export(run, "huggingface", limit=0)
