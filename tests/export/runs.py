"""Run folders to export from, trained for a few steps in this process."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.job import Job, parse_job
from meshwright.plan import Plan
from meshwright.train.output.folder import RunFolder, write_job_and_plan
from tests.train.one_process import train

DECODER: dict[str, Any] = {
    "name": "decoder",
    "model": {
        "call": "meshwright.workloads.text.decoder:Decoder",
        "layers": 1,
        "hidden": 32,
        "heads": 2,
        "sequence": 8,
        "vocabulary": 500,
    },
    "data": {
        part: {
            "call": "meshwright.workloads.text.tokens:tokens",
            "split": split,
            "sequence": 8,
            "vocabulary": 500,
            "samples": samples,
        }
        for part, split, samples in (("train", "train", 16), ("eval", "test", 11))
    },
    "loss": {"call": "meshwright.workloads.text.decoder:NextTokenLoss"},
    "metrics": {"accuracy": {"call": "meshwright.workloads.text.decoder:token_accuracy"}},
    "optimizer": {"call": "torch.optim:AdamW", "lr": 0.01},
    "train": {"steps": 2, "global_batch": 4},
    "log": {"tensorboard": False},
}


class DataDependent(nn.Module):
    """Its control flow depends on the data, so torch.export cannot export it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out if float(out.detach().sum()) > 0 else out + 1


class FixedBatchSize(nn.Module):
    """Once traced, it works for one batch size only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out * torch.ones(int(x.shape[0]), 1) if x.shape[0] == 2 else out


def train_run(job: Job, folder: Path) -> Path:
    """Trains, and leaves the files in the folder that `meshwright train` would leave."""
    train(job, folder)
    write_job_and_plan(RunFolder(folder), job, Plan())
    return folder


def decoder_run(folder: Path) -> Path:
    return train_run(parse_job(DECODER), folder)
