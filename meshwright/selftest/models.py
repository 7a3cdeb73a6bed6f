"""The small models that the selftest trains, with their data, as requests for a proof."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from meshwright.plan import Plan
from meshwright.proof.request import ProofRequest, UserModel
from meshwright.workloads.text.decoder import NextTokenLoss
from meshwright.workloads.text.decoder_sizes import decoder

ModelName = Literal["decoder", "mixture", "images"]
STEPS = 3
GLOBAL_BATCH = 16
_SAMPLES = 42  # the third batch is short
_WORDS, _LENGTH, _CLASSES = 48, 8, 4


class RandomTokens(Dataset[Any]):
    """Random texts with random next words."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self._words = torch.randint(0, _WORDS, (2, _SAMPLES, _LENGTH), generator=generator)

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._words[0, index], self._words[1, index]


class RandomImages(Dataset[Any]):
    """Random images of random classes."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self._images = torch.randn(_SAMPLES, 1, 8, 8, generator=generator)
        self._classes = torch.randint(0, _CLASSES, (_SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._images[index], self._classes[index]


def build_request(model: ModelName, plan: Plan, dtype: str) -> ProofRequest:
    """The request for a proof of one of the models under a plan."""
    torch.manual_seed(0)
    if model != "images":
        sizes = {"layers": 4, "hidden": 16, "heads": 4, "vocabulary": _WORDS, "sequence": _LENGTH, "dropout": 0.0}
        module: nn.Module = decoder("gpt2", **sizes, experts={"number": 4} if model == "mixture" else None)
        data: Dataset[Any] = RandomTokens()
        loss: Any = NextTokenLoss()
    else:
        module = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, _CLASSES)
        )
        data, loss = RandomImages(), F.cross_entropy
    subject = UserModel(
        model=module,
        optimizer=torch.optim.AdamW(module.parameters(), lr=0.01),
        loss=loss,
        data=data,
        global_batch=GLOBAL_BATCH,
        clip_norm=0.5,
    )
    return ProofRequest(subject, plan, STEPS, dtype)
