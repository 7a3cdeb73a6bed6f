"""Models, data and proof requests for tests: small, but each with something that is easily got wrong."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.proof.prove import prove_in_running_ranks
from meshwright.proof.request import ProofRequest, UserModel

BATCH = 8


class Points(Dataset[Any]):
    """Fewer samples than three global batches, so the last one is short. All ignored targets lie together."""

    def __init__(self, size: int = 2 * BATCH + 3, ignored: int = 0) -> None:
        generator = torch.Generator().manual_seed(size)
        self.x = torch.randn(size, 2, 6, 6, generator=generator)
        self.y = torch.randint(0, 4, (size,), generator=generator)
        self.y[:ignored] = -100

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.head = nn.Linear(4 * 4 * 4, 4)

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.head(self.conv(image).tanh().flatten(1))
        return out


class Casting(Plain):
    """Computes in fp32 between two layers, whatever dtype its weights have."""

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.head(self.conv(image).float().tanh().flatten(1).to(image.dtype))
        return out


class Normalized(nn.Module):
    """The bias of a convolution before BatchNorm has no gradient in exact arithmetic; rounding alone gives it one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(6 * 4 * 4, 4)

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(self.norm(self.conv(image)).relu().flatten(1)))
        return out


class Attending(nn.Module):
    """Tied weights, a layer that is never used, and an attention whose key bias has no gradient but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8, bias=False)
        self.again.weight = self.mix.weight
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(8, 4)

    def forward(self, image: Tensor) -> Tensor:
        x = self.embed(image.transpose(1, 2).flatten(2))
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        out: Tensor = self.head(self.again(self.mix(x).tanh()).mean(1))
        return out


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.norm(self.conv(x)).relu()
        return out


class Residual(nn.Module):
    """Blocks that can be recomputed, which must not update running statistics twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(2) for _ in range(4)])
        self.head = nn.Linear(2 * 36, 4)

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(image).flatten(1))
        return out


class Tying(nn.Module):
    """A parameter that a cut leaves on both stages, and a pair of layers to split."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(72, 8)
        self.mix = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.again = nn.Linear(8, 8, bias=False)
        self.again.weight = self.mix.weight
        self.head = nn.Linear(8, 4)

    def forward(self, image: Tensor) -> Tensor:
        x = self.norm(self.mix(self.embed(image.flatten(1))).tanh())
        out: Tensor = self.head(self.again(x + self.down(self.up(x).tanh())))
        return out


def sum_and_count(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output, target, reduction="sum"), (target != -100).sum()


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - F.one_hot(target.clamp(min=0), 4)).square().sum(dim=1).mean()


def large_loss(output: Tensor, target: Tensor) -> Tensor:
    """Its gradients overflow fp16 at first."""
    return 1e3 * F.cross_entropy(output, target)


MODELS: dict[str, type[nn.Module]] = {
    "plain": Plain,
    "normalized": Normalized,
    "attending": Attending,
    "residual": Residual,
}
LOSSES: dict[str, Any] = {
    "cross entropy": F.cross_entropy,
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.1),
    "class weights": partial(F.cross_entropy, weight=torch.arange(1.0, 5.0)),
    "sum and count": sum_and_count,
    "squared": squared,
}
OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3),
    "adam": partial(torch.optim.Adam, lr=1e-3, amsgrad=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2, eps=1e-12),
}


class Following(nn.Module):
    """Keeps the mean of the last batch in a buffer, which does not change what the model computes."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = Plain()
        self.register_buffer("center", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.center.mul_(0.9).add_(0.1 * x.mean())
        out: Tensor = self.inner(x)
        return out


class Counting(nn.Module):
    """Multiplies by a number that grows with each forward pass."""

    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = Plain()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        out: Tensor = self.inner(x) * self.passes
        return out


class Mixing(Plain):
    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = super().forward(image - image.mean(0))
        return out


OTHER_MODELS: dict[str, type[nn.Module]] = {
    "tying": Tying,
    "casting": Casting,
    "following": Following,
    "counting": Counting,
    "mixing": Mixing,
}


def spread(output: Tensor, target: Tensor) -> Tensor:
    """Compares samples: the deviation over the batch is a part of the loss."""
    return F.cross_entropy(output, target) - 0.1 * output.std(0).mean()


def decaying(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def proof_request(
    model: str = "plain",
    loss: str = "cross entropy",
    optimizer: str = "adamw",
    plan: dict[str, Any] | None = None,
    *,
    size: int = 2 * BATCH + 3,
    ignored: int = 0,
    clip_norm: float | None = 0.05,
    seed: int = 0,
    **options: Any,
) -> ProofRequest:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = (MODELS | OTHER_MODELS)[model]()
    user_model = UserModel(
        model=module,
        optimizer=OPTIMIZERS[optimizer](module.parameters()),
        loss={**LOSSES, "large": large_loss, "spread": spread}[loss],
        data=Points(size, ignored),
        global_batch=BATCH,
        schedule=decaying,
        clip_norm=clip_norm,
        seed=seed,
    )
    return ProofRequest(user_model, Plan.model_validate(plan or {}), **options)


def random_request(seed: int, ranks: int, axes: tuple[str, ...] = ("replicate",)) -> ProofRequest:
    """A request whose plan, model, loss and optimizer are drawn by the seed."""
    draw = random.Random(seed)
    sizes = dict.fromkeys(axes, 1)
    sizes[draw.choice(axes)] = ranks
    model = draw.choice(list(MODELS))
    microbatches = draw.choice([1, 2]) if ranks <= 4 else 1
    plan = {
        "axes": sizes,
        "memory": {
            "accumulation": microbatches,
            "recompute": draw.choice(["none", "selective", "full"]) if model == "residual" else "none",
        },
        "gradients": {"bucket_bytes": draw.choice([300, 10_000_000])},
        "compute": {"layout": draw.choice(["contiguous", "channels_last"])},
    }
    return proof_request(
        model,
        draw.choice(list(LOSSES)),
        draw.choice(list(OPTIMIZERS)),
        plan,
        # At least two samples for each rank's BatchNorm, but never the same number for all.
        size=2 * BATCH + (BATCH - 1 if model in ("normalized", "residual") else draw.randint(1, BATCH - 1)),
        ignored=draw.choice([0, 6]),
        clip_norm=draw.choice([None, 0.05, 100.0]),
        seed=seed,
        steps=draw.choice([3, 4]),
    )


def prove_in_pool(rank: int, world_size: int, request: ProofRequest, folder: Path) -> dict[str, Any] | None:
    """Runs in every rank of a pool. Returns the proof as JSON on rank 0."""
    world = World(rank, rank, world_size, world_size, 0, torch.device("cpu"), None)
    proof = prove_in_running_ranks(request, world, folder)
    return proof.to_dict() if proof else None


class Faulty(Plain):
    """Its gradients are right on one device, and wrong by a factor of 1.01 where there are several ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv.weight.register_hook(lambda gradient: gradient * 1.01 if dist.is_initialized() else gradient)
