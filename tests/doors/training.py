"""What the scripts of all doors train, and how they say how far they are: files in the folder of the run, to which a
script that was killed has written all that it has said."""

import hashlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

STEPS, EPOCH_STEPS, SAVE_EVERY, GLOBAL_BATCH = 80, 8, 5, 8
EPOCHS = STEPS // EPOCH_STEPS
STEP_S = 0.02  # a kill comes between any two lines of a step, and not always while a script starts
REPLICATE: dict[str, Any] = {"axes": {"replicate": 2}}


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(GLOBAL_BATCH * EPOCH_STEPS, 6, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def network() -> nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def folder_of_run() -> Path:
    return Path(next(word for word in sys.argv[1:] if not word.startswith("--")))


class Progress:
    """Rank 0 writes a line for each thing that it has done."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / "progress").open("a") if rank == 0 else None
        (folder / f"rank-{rank}").write_text(str(os.getpid()))

    def began(self, step: int) -> None:
        self._write(f"began {step}")

    def step(self, step: int) -> None:
        time.sleep(STEP_S)
        self._write(f"step {step}")

    def saved(self, step: int) -> None:
        self._write(f"saved {step}")

    def ended(self, weights: Mapping[str, Tensor]) -> None:
        content = b"".join(weights[name].detach().numpy().tobytes() for name in sorted(weights))
        self._write(f"weights {hashlib.sha256(content).hexdigest()}")

    def _write(self, line: str) -> None:
        if self._file is not None:
            self._file.write(line + "\n")
            self._file.flush()


def numbered(folder: Path, pattern: str = "step-*") -> list[Path]:
    """The checkpoints of a folder, the newest first."""
    return sorted(folder.glob(pattern), key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
