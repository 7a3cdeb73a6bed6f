"""`meshwright train`, whose loader reads samples from files, against steps of the same plan on one batch that is on the
GPU already and on the batches of torch's own loader: `python -m validation.speed.loader [mnist] [resnet50] [gpt2]`
measures them in turns.

The digits come with the package. Pictures are bytes in a memory-mapped file, which loader processes turn into floats;
decoding JPEG files is left out, because 256 pictures in 36 ms are more than the cores of one machine decode. Tokens are
random numbers in a token file.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, default_collate

import meshwright as mw
from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.train.build import build_data
from meshwright.train.session import Session
from meshwright.workloads.text.token_build import TokenFileInfo
from validation.bench.peers.compare import rate_after_warm_up
from validation.memory.one_gpu import OPTIMIZERS, case_loss, make_model
from validation.steps.steps import cases

ROUNDS = 3
_OPTIMIZERS = {
    "sgd": {"call": "torch.optim:SGD", "lr": 0.01, "momentum": 0.9},
    "adamw": {"call": "torch.optim:AdamW", "lr": 1e-4},
}
_STEPS = {"mnist": 1500, "resnet50": 120, "gpt2": 150}
_WORKERS = {"mnist": 0, "resnet50": 12, "gpt2": 2}
_PICTURES, _TOKENS = 2048, 4_000_000


class Pictures(Dataset[tuple[Tensor, int]]):
    """Pictures of 3 × 224 × 224 bytes in one file."""

    def __init__(self, root: str) -> None:
        self._file = Path(root) / "pictures.npy"

    def __len__(self) -> int:
        return _PICTURES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pictures = np.load(self._file, mmap_mode="r")
        return torch.from_numpy(pictures[index].copy()).float().div_(255), index % 1000


def _data(name: str, folder: Path) -> dict[str, Any]:
    """Writes the files of a workload, and returns how a job reads them."""
    generator = np.random.default_rng(0)
    if name == "mnist":
        return {"call": "meshwright.workloads.mnist:digits", "split": "train"}
    if name == "resnet50":
        np.save(folder / "pictures.npy", generator.integers(256, size=(_PICTURES, 3, 224, 224), dtype=np.uint8))
        return {"call": "validation.speed.loader:Pictures", "root": str(folder)}
    vocabulary = 50257
    generator.integers(vocabulary, size=_TOKENS, dtype=np.uint16).tofile(folder / "train.bin")
    description = TokenFileInfo("uint16", _TOKENS, vocabulary, tokenizer="none", end=None, mask=None, checksum="")
    (folder / "train.json").write_text(json.dumps(asdict(description)))
    return {
        "call": "meshwright.workloads.text.token_file:tokens",
        "split": "train",
        "root": str(folder),
        "sequence": 1024,
        "vocabulary": vocabulary,
    }


def _write_job(name: str, folder: Path) -> Path:
    case = cases()[name]
    content = {
        "model": case["model"],
        "data": {"train": _data(name, folder), "workers": _WORKERS[name], "drop_last": True},
        "loss": {"call": "validation.memory.one_gpu:case_loss"},
        "optimizer": _OPTIMIZERS[case["optimizer"]],
        "train": {"steps": _STEPS[name], "global_batch": case["batch"]},
        "checkpoint": {"every_steps": None},
        "log": {"every_steps": 10, "tensorboard": False},
        "allow": "changes",
        "tune": False,
        "output": str(folder / "runs"),
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def _train_step_s(job_file: Path, batch: int) -> tuple[float, Plan]:
    """Runs `meshwright train`. Returns the seconds of a step after the first ones, and the plan."""
    subprocess.run([sys.executable, "-m", "meshwright", "train", str(job_file), "--resume", "never"], check=True)
    run = max((job_file.parent / "runs").iterdir())
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return batch / rate_after_warm_up(entries), mw.load_plan(run / "plan.yaml")


def _session(case: dict[str, Any], plan: Plan) -> Session:
    with torch.device("cuda"):
        model = make_model(case)
    return Session(
        model,
        lambda parameters: OPTIMIZERS[case["optimizer"]](parameters.values()),
        loss=case_loss,
        plan=plan,
        world=World(0, 0, 1, 1, 0, torch.device("cuda", 0), None),
    )


def _session_step_s(session: Session, batches: Iterable[Any]) -> float:
    """The median of the seconds of a step, over groups of ten, without the first two groups."""
    seconds = []
    begin = time.perf_counter()
    for number, batch in enumerate(batches, start=1):
        session.step(batch)
        if number % 10 == 0:
            torch.cuda.synchronize()
            now = time.perf_counter()
            seconds.append((now - begin) / 10)
            begin = now
    return median(seconds[2:])


def _torch_loader(name: str, dataset: Any, batch: int) -> Iterable[Any]:
    """Torch's own loader, with as many batches as `train` makes steps."""
    sampler = RandomSampler(dataset, replacement=True, num_samples=batch * _STEPS[name])
    return DataLoader(dataset, batch, sampler=sampler, num_workers=_WORKERS[name], pin_memory=True)


def compare(name: str) -> None:
    case = cases()[name]
    with tempfile.TemporaryDirectory() as folder:
        job_file = _write_job(name, Path(folder))
        dataset, _ = build_data(mw.load_job(job_file))
        batch = [tensor.cuda() for tensor in default_collate([dataset[index] for index in range(case["batch"])])]
        for number in range(ROUNDS):
            trained_s, plan = _train_step_s(job_file, case["batch"])
            session = _session(case, plan)
            alone_s = _session_step_s(session, repeat(tuple(batch), 100))
            loaded_s = _session_step_s(session, _torch_loader(name, dataset, case["batch"]))
            print(
                f"{name} round {number}: {alone_s * 1e3:.3f} ms with one batch, {loaded_s * 1e3:.3f} ms with torch's"
                f" loader ({loaded_s / alone_s:.3f}), {trained_s * 1e3:.3f} ms in a run ({trained_s / alone_s:.3f});"
                f" {plan.summary()}",
                flush=True,
            )


if __name__ == "__main__":
    for workload in sys.argv[1:] or list(_STEPS):
        compare(workload)
