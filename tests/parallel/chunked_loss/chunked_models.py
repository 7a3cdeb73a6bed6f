"""Models with large heads, and sessions that train them with a loss in chunks or with whole scores."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.plan import Plan
from meshwright.train.session import Session
from tests.profile.structure.structured_models import transformers_model
from tests.train.one_process import world

WORDS, LENGTH, WIDTH, SAMPLES = 100, 6, 16, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.layer(x))


class Words(nn.Module):
    """Predicts a word from each word, with a head that may have a bias or the embedding's weight."""

    def __init__(self, *, bias: bool = False, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.head.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def without_dropout(name: str) -> nn.Module:
    model = transformers_model(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


MODELS: dict[str, Any] = {
    "plain": Words,
    "bias": lambda: Words(bias=True),
    "tied": lambda: Words(tied=True),
    "frozen": lambda: Words(bias=True, frozen=True),
    "gpt2": lambda: without_dropout("GPT2LMHeadModel"),
    "llama": lambda: without_dropout("LlamaForCausalLM"),
}


def mean_loss(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.view(-1, WORDS), target.view(-1))


def counted_loss(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="sum"), (target != -100).sum()


def smoothed_loss(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2), target, label_smoothing=0.1)


def loss_of_scores_too(scores: Tensor, target: Tensor) -> Tensor:
    return mean_loss(scores, target) + 0.01 * scores.square().mean()


LOSSES: dict[str, Any] = {
    "mean": mean_loss,
    "counted": counted_loss,
    "smoothed": smoothed_loss,
    "scores too": loss_of_scores_too,
    "model": None,
}


def batch(step: int, dtypes: str = "words") -> Any:
    """A global batch. The targets of the first samples are ignored, so that ranks have different numbers of them."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, WORDS, (SAMPLES, LENGTH), generator=generator)
    target = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=generator)
    target[:3, 2:] = -100
    return {"input_ids": tokens, "labels": target} if dtypes == "model" else (tokens, target)


def plan_of(chunks: int, **groups: dict[str, Any]) -> Plan:
    return Plan.model_validate({**groups, "compute": {**groups.get("compute", {}), "loss_chunks": chunks}})


def make_session(
    model: str, loss: str, plan: Plan, rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float64
) -> Session:
    torch.manual_seed(0)
    return Session(
        MODELS[model]().to(dtype),
        lambda parameters: torch.optim.SGD([p for p in parameters.values() if p.requires_grad], lr=0.1),
        loss=LOSSES[loss],
        plan=plan,
        world=world(rank, size),
        sample=batch(0, loss),
    )


def share(data: Any, rank: int, size: int) -> Any:
    """The samples of a rank."""
    if isinstance(data, dict):
        return {name: tensor.chunk(size)[rank] for name, tensor in data.items()}
    return tuple(tensor.chunk(size)[rank] for tensor in data)


def train(
    rank: int, size: int, model: str, loss: str, plan: Plan, steps: int = 2
) -> tuple[list[float], dict[str, Tensor]]:
    """Returns the losses of some steps, and the weights after them."""
    session = make_session(model, loss, plan, rank, size)
    losses = [float(session.step(share(batch(step, loss), rank, size))) for step in range(steps)]
    return losses, {name: tensor.clone() for name, tensor in session.state_dict().items()}
