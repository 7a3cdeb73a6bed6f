"""The variables and files with which the blocks of a page are run."""

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwright as mw
from documentation.blocks import REPOSITORY
from meshwright.user.torchvision_import import mend_torchvision


def points(count: int) -> TensorDataset:
    inputs = torch.randn(count, 20, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.argmax(dim=1) % 5)


def _loop() -> dict[str, Any]:
    """What most snippets expect: a model and what trains it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 5))
    dataset = points(64)
    return {
        "mw": mw,
        "torch": torch,
        "F": F,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": F.cross_entropy,
        "loss_function": F.cross_entropy,
        "dataset": dataset,
        "sample_batch": dataset[:8],
        "loader": DataLoader(dataset, batch_size=16),
        "plan": mw.Plan.model_validate({"axes": {"replicate": 2}}),
    }


def _write_files(folder: Path, *names: str) -> None:
    """Files that jobs name; a job is only read, so that nothing is imported from them."""
    for name in names:
        (folder / name).write_text("")


def _readme(folder: Path) -> dict[str, Any]:
    _write_files(folder, "my_model.py", "my_data.py")
    return _loop()


def _job(folder: Path) -> dict[str, Any]:
    _write_files(folder, "model.py", "my_data.py")
    return {"torch": torch}


def _cluster(folder: Path) -> dict[str, Any]:
    device = (
        "kind: cuda\nmemory_bytes: 4e10\nbandwidth_bytes_per_s: 1e12\nrates: {fp32: 2e13, bf16: 2e14}\nlaunch_s: 5e-6\n"
    )
    (folder / "z900.yaml").write_text(f"name: z900\n{device}sources: {{}}\n")
    return {}


def _launch(folder: Path) -> dict[str, Any]:
    """A job with a plan for 16 ranks, so that no plan has to be found."""
    job = yaml.safe_load((REPOSITORY / "jobs" / "mnist.yaml").read_text())
    (folder / "job.yaml").write_text(yaml.safe_dump({**job, "plan": {"axes": {"replicate": 16}}}))
    return {}


def _memory(folder: Path) -> dict[str, Any]:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(20, 20), nn.ReLU()) for _ in range(4)))
    model = nn.Sequential(OrderedDict(layers=layers, head=nn.Linear(20, 5)))
    return {**_loop(), "model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def _notebook(folder: Path) -> dict[str, Any]:
    return {**_loop(), "dataset": points(512)}


def _prove(folder: Path) -> dict[str, Any]:
    return {**_loop(), "__name__": "__main__"}


def _deepspeed(folder: Path) -> dict[str, Any]:
    config = {"train_batch_size": 16, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    (folder / "ds_config.json").write_text(json.dumps(config))
    return _loop()


def _one_rank(folder: Path) -> dict[str, Any]:
    names = _loop()
    (folder / "plan.yaml").write_text("axes: {replicate: 1}\n")
    names["scheduler"] = torch.optim.lr_scheduler.ConstantLR(names["optimizer"])
    return names


def _lightning(folder: Path) -> dict[str, Any]:
    mend_torchvision()  # Lightning imports torchvision where it is installed
    from lightning.pytorch import LightningModule

    _write_files(folder, "my_module.py")
    return {**_one_rank(folder), "LightningModule": LightningModule}


def _transformers(folder: Path) -> dict[str, Any]:
    from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    samples = [{"input_ids": torch.arange(8), "labels": torch.tensor(number % 2)} for number in range(8)]
    return {
        "model": BertForSequenceClassification(BertConfig(vocab_size=20, **sizes)),
        "args": TrainingArguments(str(folder), max_steps=1, report_to=[], use_cpu=True),
        "train": samples,
        "test": samples,
    }


PREPARED: dict[str, Callable[[Path], dict[str, Any]]] = {
    "README.md": _readme,
    "docs/accelerate.md": _one_rank,
    "docs/cluster.md": _cluster,
    "docs/deepspeed.md": _deepspeed,
    "docs/job.md": _job,
    "docs/launch.md": _launch,
    "docs/lightning.md": _lightning,
    "docs/memory.md": _memory,
    "docs/notebook.md": _notebook,
    "docs/prove.md": _prove,
    "docs/transformers.md": _transformers,
}
