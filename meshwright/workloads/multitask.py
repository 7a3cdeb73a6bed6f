"""One encoder for several tasks: a head a task on what it makes of the texts, and a loss that asks each sample of its
own task's head alone (Liu et al. 2019, arXiv:1901.11504).

Every head runs on the whole batch, so all shapes are the same in every step and heads may live on different ranks. A
target is (number of the task, its value).
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import InputError, did_you_mean
from meshwright.workloads.task_kinds import Task, Tasks, read_tasks
from meshwright.workloads.text.encoder import Encoder, initialize
from meshwright.workloads.text.json_lines import PADDING


class Multitask(nn.Module):
    """Token numbers (batch, texts, length) to each task's answers by its name: class scores (batch, classes), or one
    number a sample. The encoder is BERT-base by default."""

    def __init__(
        self,
        tasks: Tasks,
        layers: int = 12,
        hidden: int = 768,
        heads: int = 12,
        sequence: int = 128,
        vocabulary: int = 30522,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.encoder = Encoder(layers, hidden, heads, sequence, vocabulary, dropout=dropout)
        self.heads = nn.ModuleDict({task.name: _head(task, hidden) for task in read_tasks(tasks)})
        initialize(self)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        features = self.encoder(tokens.flatten(0, 1)).unflatten(0, (-1, tokens.shape[1]))
        there = (tokens != PADDING).unsqueeze(-1)
        texts = torch.where(there, features, 0.0).sum(2) / there.sum(2).clamp(min=1)
        return {name: head(texts) for name, head in self.heads.items()}


def _head(task: Task, hidden: int) -> nn.Module:
    if task.kind == "classification":
        return Classify(hidden, task.classes)
    return {"regression": Estimate, "similarity": Compare, "ranking": Rank}[task.kind](hidden)


class Classify(nn.Module):
    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, classes)

    def forward(self, texts: Tensor) -> Tensor:
        scores: Tensor = self.out(torch.tanh(self.inner(texts[:, 0])))
        return scores


class Estimate(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, 1)

    def forward(self, texts: Tensor) -> Tensor:
        value: Tensor = self.out(torch.tanh(self.inner(texts[:, 0])))
        return value.squeeze(-1)


class Compare(nn.Module):
    """How alike two texts are, from -1 to 1: the cosine between them."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.project = nn.Linear(hidden, hidden)

    def forward(self, texts: Tensor) -> Tensor:
        first, second = F.normalize(self.project(texts[:, :2]), dim=-1).unbind(1)
        return (first * second).sum(-1)


class Rank(nn.Module):
    """By how much the better document suits the query more than the worse one does."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(hidden, hidden)
        self.document = nn.Linear(hidden, hidden)

    def forward(self, texts: Tensor) -> Tensor:
        scores = (self.query(texts[:, :1]) * self.document(texts[:, 1:])).sum(-1)
        return scores[:, 0] - scores[:, 1]


class MultitaskLoss(nn.Module):
    """The mean over all samples of each one's own: cross entropy, squared error, or for rankings the logistic loss of
    the margin. `weights` by task, 1 where nothing is said."""

    def __init__(self, tasks: Tasks, weights: Mapping[str, float] | None = None) -> None:
        super().__init__()
        self.tasks = read_tasks(tasks)
        names = [task.name for task in self.tasks]
        unknown = next((name for name in weights or {} if name not in names), None)
        if unknown is not None:
            raise InputError(f"weights: there is no task '{unknown}'{did_you_mean(unknown, names)}")
        self.weights = {name: (weights or {}).get(name, 1.0) for name in names}

    def forward(self, output: Mapping[str, Tensor], target: Tensor) -> Tensor:
        number, value = target.unbind(-1)
        total = torch.zeros((), device=target.device)
        for task in self.tasks:
            own = number == task.number
            losses = _losses(task, output[task.name], torch.where(own, value, 0))
            total = total + self.weights[task.name] * torch.where(own, losses, 0).sum()
        return total / len(target)


def _losses(task: Task, output: Tensor, value: Tensor) -> Tensor:
    if task.kind == "classification":
        return F.cross_entropy(output, value.long(), reduction="none")
    if task.kind == "ranking":
        return F.softplus(-output)
    return (output - value).square()


# ---- metrics of one task, over the samples that are its own


def task_accuracy(output: Mapping[str, Tensor], target: Tensor, task: str) -> tuple[Tensor, Tensor]:
    """The share of a classification's samples whose class has the largest score."""
    own, value = _own(output, target, task)
    return ((output[task].argmax(-1) == value) & own).sum(), own.sum()


def task_error(output: Mapping[str, Tensor], target: Tensor, task: str) -> tuple[Tensor, Tensor]:
    """The mean absolute difference of a regression or similarity."""
    own, value = _own(output, target, task)
    return torch.where(own, (output[task] - value).abs(), 0).sum(), own.sum()


def task_order(output: Mapping[str, Tensor], target: Tensor, task: str) -> tuple[Tensor, Tensor]:
    """The share of a ranking's samples whose better document comes first."""
    own, _ = _own(output, target, task)
    return ((output[task] > 0) & own).sum(), own.sum()


def _own(output: Mapping[str, Tensor], target: Tensor, task: str) -> tuple[Tensor, Tensor]:
    if task not in output:
        raise InputError(f"metrics: there is no task '{task}'{did_you_mean(task, output)}")
    number, value = target.unbind(-1)
    return number == list(output).index(task), value
