"""One encoder for several tasks, with one head per task (Liu et al. 2019, arXiv:1901.11504). The loss of a sample
depends on the head of its task only.

Every head runs on the whole batch, so shapes are the same in every step and heads can be placed on different ranks. A
target is (number of the task, value).
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
    """Maps token numbers (batch, texts, length) to a dict of all tasks' outputs: class scores (batch, classes) for a
    classification, one number per sample (batch,) for other tasks. The encoder is BERT-base by default."""

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
        is_token = (tokens != PADDING).unsqueeze(-1)
        texts = torch.where(is_token, features, 0.0).sum(2) / is_token.sum(2).clamp(min=1)
        return {name: head(texts) for name, head in self.heads.items()}


def _head(task: Task, hidden: int) -> nn.Module:
    if task.kind == "classification":
        return Classify(hidden, task.classes)
    return {"regression": Estimate, "similarity": Compare, "ranking": Rank}[task.kind](hidden)


class Classify(nn.Module):
    """A head that returns class scores for the first text."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, classes)

    def forward(self, texts: Tensor) -> Tensor:
        scores: Tensor = self.out(torch.tanh(self.inner(texts[:, 0])))
        return scores


class Estimate(nn.Module):
    """A head that returns a number estimated from the first text."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, 1)

    def forward(self, texts: Tensor) -> Tensor:
        value: Tensor = self.out(torch.tanh(self.inner(texts[:, 0])))
        return value.squeeze(-1)


class Compare(nn.Module):
    """A head that returns the similarity of the first two texts, from -1 to 1: the cosine of their projections."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.project = nn.Linear(hidden, hidden)

    def forward(self, texts: Tensor) -> Tensor:
        first, second = F.normalize(self.project(texts[:, :2]), dim=-1).unbind(1)
        return (first * second).sum(-1)


class Rank(nn.Module):
    """A head that returns a margin: the score of the better document (second text) for the query (first text), minus
    the score of the worse document (third text)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(hidden, hidden)
        self.document = nn.Linear(hidden, hidden)

    def forward(self, texts: Tensor) -> Tensor:
        scores = (self.query(texts[:, :1]) * self.document(texts[:, 1:])).sum(-1)
        return scores[:, 0] - scores[:, 1]


class MultitaskLoss(nn.Module):
    """The mean over all samples of the loss of each sample's task: cross entropy for classifications, the logistic loss
    of the margin for rankings, the squared error otherwise. `weights` multiplies the losses of a task, by its name;
    tasks that it does not name have weight 1."""

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
            is_of_task = number == task.number
            losses = _sample_losses(task, output[task.name], torch.where(is_of_task, value, 0))
            total = total + self.weights[task.name] * torch.where(is_of_task, losses, 0).sum()
        return total / len(target)


def _sample_losses(task: Task, output: Tensor, value: Tensor) -> Tensor:
    if task.kind == "classification":
        return F.cross_entropy(output, value.long(), reduction="none")
    if task.kind == "ranking":
        return F.softplus(-output)
    return (output - value).square()


# ---- metrics over the samples of one task: each returns (sum, number of samples), whose ratio is the metric


def task_accuracy(output: Mapping[str, Tensor], target: Tensor, task: str) -> tuple[Tensor, Tensor]:
    """The share of samples of a classification task whose class has the largest score."""
    is_of_task, value = _samples_of_task(output, target, task)
    return ((output[task].argmax(-1) == value) & is_of_task).sum(), is_of_task.sum()


def task_error(output: Mapping[str, Tensor], target: Tensor, task: str) -> tuple[Tensor, Tensor]:
    """The mean absolute error of a regression or similarity task."""
    is_of_task, value = _samples_of_task(output, target, task)
    return torch.where(is_of_task, (output[task] - value).abs(), 0).sum(), is_of_task.sum()


def task_order(output: Mapping[str, Tensor], target: Tensor, task: str) -> tuple[Tensor, Tensor]:
    """The share of samples of a ranking task whose better document has the larger score."""
    is_of_task, _ = _samples_of_task(output, target, task)
    return ((output[task] > 0) & is_of_task).sum(), is_of_task.sum()


def _samples_of_task(output: Mapping[str, Tensor], target: Tensor, task: str) -> tuple[Tensor, Tensor]:
    """Returns which samples belong to the task, and the target values of all samples."""
    if task not in output:
        raise InputError(f"metrics: there is no task '{task}'{did_you_mean(task, output)}")
    number, value = target.unbind(-1)
    return number == list(output).index(task), value
