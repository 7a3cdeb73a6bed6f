"""Records of a tiny training, written without processes: one process computes what each rank would have, and tests
change it before it is written."""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.audit.causes.diagnose import diagnose
from meshwright.audit.comparison.compare import compare_records
from meshwright.audit.evidence import Evidence, Explained
from meshwright.audit.recorded_run import RecordedRun
from meshwright.audit.recorder.parts import Region, whole_region
from meshwright.audit.recorder.record_files import write_tensors
from meshwright.audit.recorder.samples import digest_elements, digest_rows
from meshwright.audit.recorder.settings import Settings

SAMPLES, LENGTH, WORDS, WIDTH, STEPS = 8, 6, 12, 8, 2
LIMIT = 0.05  # of the norm, smaller than the norm
DIVIDED_BY_TENSOR = {"up.weight": 0, "up.bias": 0, "down.weight": 1, "experts.0.weight": 0}

Tensors = dict[str, Tensor]


class Model(nn.Module):
    """Embedding, normalization with statistics, two layers, a router's stand-in with an expert, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.router = nn.Linear(WIDTH, 2, bias=False)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        hidden = hidden + self.norm(hidden.flatten(0, 1)).reshape(hidden.shape)
        hidden = hidden + self.down(torch.tanh(self.up(hidden)))
        shares = self.router(hidden).softmax(-1)
        routed = sum(shares[..., index, None] * expert(hidden) for index, expert in enumerate(self.experts))
        return self.head(hidden + routed)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a step; later samples have more targets that are ignored."""
    tokens = torch.randint(WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(step))
    targets = torch.randint(WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(100 + step))
    for sample in range(SAMPLES // 2, SAMPLES):
        targets[sample, 1 + sample % 3 :] = -100
    return tokens, targets


@dataclass(frozen=True)
class Share:
    """What samples of a step give: the sum of their losses, valid targets, and gradients of that sum."""

    loss: float
    valid: int
    gradients: Tensors


@cache
def trained() -> list[tuple[Tensors, Tensors, Tensors]]:
    """The right training in fp64: weights and buffers before each step and after the last, and gradients."""
    torch.manual_seed(0)
    model = Model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps: list[tuple[Tensors, Tensors, Tensors]] = []
    for step in range(1, STEPS + 1):
        before = _copy(dict(model.named_parameters())), _copy(dict(model.named_buffers()))
        optimizer.zero_grad()
        _loss(model, *batch(step)).backward()
        gradients = _gradients(model)
        norm = math.sqrt(sum(float(value.square().sum()) for value in gradients.values()))
        steps.append((*before, {**gradients, "": torch.tensor(norm, dtype=torch.float64)}))
        optimizer.step()
    steps.append((_copy(dict(model.named_parameters())), _copy(dict(model.named_buffers())), {}))
    return steps


@cache
def share(step: int, rows: range, batch_statistics: bool = False) -> Share:
    """What these samples alone give from the weights before a step. Unless `batch_statistics`, batch normalization sees
    all samples."""
    weights, buffers, _ = trained()[step - 1]
    model = Model().double()
    model.load_state_dict({**weights, **buffers})
    tokens, targets = batch(step)
    if batch_statistics:
        loss = _summed(model(tokens[rows.start : rows.stop]), targets[rows.start : rows.stop])
    else:
        loss = _summed(model(tokens)[rows.start : rows.stop], targets[rows.start : rows.stop])
    loss.backward()
    valid = int((targets[rows.start : rows.stop] != -100).sum())
    return Share(float(loss.detach()), valid, _gradients(model))


def _loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def _summed(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def _gradients(model: nn.Module) -> Tensors:
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def _copy(values: Tensors) -> Tensors:
    return {name: value.detach().clone() for name, value in values.items()}


# ---- records


@dataclass
class Record:
    """A training as it is recorded. `tensors` holds the whole tensors as each rank has them, by step and kind; the
    layout says which regions of them are written."""

    ranks: int
    layout: str
    tensors: dict[tuple[int, str], list[Tensors]]
    events: list[list[dict[str, Any]]]
    same_as: dict[str, str] = field(default_factory=dict)
    stages: list[int | None] = field(default_factory=list)

    def change(self, kind: str, fault: Callable[[int, str, Tensor], Tensor | None], step: int = 1) -> "Record":
        """Changes each rank's tensors by `fault(rank, name, value)`; None removes one."""
        for rank, values in enumerate(self.tensors[step, kind]):
            changed = {name: fault(rank, name, value) for name, value in values.items()}
            self.tensors[step, kind][rank] = {name: value for name, value in changed.items() if value is not None}
        return self

    def of_kind(self, kind: str) -> Iterable[tuple[int, dict[str, Any]]]:
        """Pairs of a rank and its event."""
        return [(rank, event) for rank, events in enumerate(self.events) for event in events if event["kind"] == kind]

    def write(self, folder: Path) -> RecordedRun:
        for rank in range(self.ranks):
            own = folder / f"rank-{rank:05d}"
            own.mkdir(parents=True)
            (own / "header.json").write_text(json.dumps(self._header(rank)))
            (own / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in self.events[rank]))
            for (step, kind), values in self.tensors.items():
                parts = {
                    f"{name}#0": regions[0].of(value).to(_stored(value)).contiguous()
                    for name, value in values[rank].items()
                    if name not in self.same_as and (regions := self._regions(rank, name, value))
                }
                write_tensors(own / f"{step:04d}-{kind}-0.safetensors", parts)
        Settings().write(folder)
        return RecordedRun(folder)

    def _regions(self, rank: int, name: str, value: Tensor) -> list[Region]:
        return regions(self.layout, self.ranks, rank, name, tuple(value.shape))

    def _header(self, rank: int) -> dict[str, Any]:
        start = self.tensors[0, "start"][rank]
        parameters = dict(Model().named_parameters())

        def describe(name: str, value: Tensor) -> dict[str, Any]:
            return {
                "shape": list(value.shape),
                "dtype": "float32",
                "trained": True,
                "layout": "whole",
                "same_as": self.same_as.get(name),
                "reference_name": None,
                "parts": [region.to_json() for region in self._regions(rank, name, value)],
            }

        return {
            "rank": rank,
            "world_size": self.ranks,
            "device": "cpu",
            "stage": self.stages[rank] if self.stages else None,
            "dtypes": ["float32"],
            "parameters": {name: describe(name, value) for name, value in start.items() if name in parameters},
            "buffers": {name: describe(name, value) for name, value in start.items() if name not in parameters},
            "notes": [],
        }


def regions(layout: str, ranks: int, rank: int, name: str, shape: tuple[int, ...]) -> list[Region]:
    """The region of a tensor that a rank holds: all of it (`replicated`), its rows (`rows`), or its part of what tensor
    parallelism divides (`tensor`). With `experts`, each expert is on one rank."""
    box = [(0, size) for size in shape]
    if layout == "experts" and name.startswith("experts."):
        return [whole_region(shape)] if int(name.split(".")[1]) % ranks == rank else []
    dim = {"rows": 0}.get(layout, DIVIDED_BY_TENSOR.get(name) if layout == "tensor" else None)
    if dim is not None and shape and "norm.running" not in name:
        size = -(-shape[dim] // ranks)
        first = min(shape[dim], rank * size)
        box[dim] = (first, min(size, shape[dim] - first))
        if not box[dim][1]:
            return []
    return [Region(box=tuple(box))]


def rows_of(rank: int, ranks: int) -> range:
    size = SAMPLES // ranks
    return range(rank * size, (rank + 1) * size)


def right_record(ranks: int = 1, layout: str = "replicated", same_samples: bool = False, clips: bool = False) -> Record:
    """A right training, on ranks with different samples unless `same_samples`."""
    tensors: dict[tuple[int, str], list[Tensors]] = {}
    weights, buffers, _ = trained()[0]
    tensors[0, "start"] = [{**weights, **buffers} for _ in range(ranks)]
    events: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
    for step in range(1, STEPS + 1):
        gradients = {name: value for name, value in trained()[step - 1][2].items() if name}
        norm = float(trained()[step - 1][2][""])
        after, after_buffers, _ = trained()[step]
        if clips:
            tensors[step, "unclipped"] = [dict(gradients) for _ in range(ranks)]
        clipped = {name: value * (LIMIT / norm if clips else 1.0) for name, value in gradients.items()}
        tensors[step, "gradient"] = [dict(clipped) for _ in range(ranks)]
        tensors[step, "weight"] = [dict(after) for _ in range(ranks)]
        tensors[step, "buffer"] = [dict(after_buffers) for _ in range(ranks)]
        for rank in range(ranks):
            rows = range(SAMPLES) if same_samples else rows_of(rank, ranks)
            events[rank] += _events(step, rows, norm if clips else None, list(gradients))
    return Record(ranks, layout, tensors, events)


def _events(step: int, rows: range, norm: float | None, names: list[str]) -> list[dict[str, Any]]:
    part = share(step, rows)
    events = [inputs_event(step, batch(step)[0][rows.start : rows.stop])]
    counts = {"valid": part.valid, "total": len(rows) * LENGTH, "summed": part.loss}
    events.append({"kind": "targets", "step": step, **counts})
    events.append({"kind": "loss", "step": step, "value": part.loss / part.valid, "dtype": "torch.float32"})
    if norm is not None:
        of_norm = {"value": norm, "limit": LIMIT, "names": names, "partial": False, "counted": True}
        events.append({"kind": "norm", "step": step, **of_norm})
    if step == 1:
        values = {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False}
        events.append({"kind": "options", "step": 1, "optimizer": "AdamW", "names": names, "values": values})
    return events


def inputs_event(step: int, tensor: Tensor, leaf: str = "0") -> dict[str, Any]:
    return {
        "kind": "inputs",
        "step": step,
        "module": "Model",
        "leaf": leaf,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "rows": digest_rows(tensor),
        "elements": digest_elements(tensor),
    }


def _stored(value: Tensor) -> torch.dtype:
    return torch.float32 if value.is_floating_point() else value.dtype


# ---- the cause


def evidence_of(reference: Record, candidate: Record, folder: Path) -> Evidence:
    """Writes both records and compares them."""
    right, own = reference.write(folder / "reference"), candidate.write(folder / "candidate")
    comparison = compare_records(right, own, None)
    first = comparison.first
    assert first is not None, "no difference was found"
    differences: dict[Any, Any] = {}
    for difference in comparison.differences:
        if difference.step == first.step:
            differences[difference.what] = (*differences.get(difference.what, ()), difference)
    return Evidence(right, own, first, differences, comparison.bounds)


def explain(candidate: Record, folder: Path, reference: Record | None = None) -> Explained:
    clips = (1, "unclipped") in candidate.tensors
    return diagnose(evidence_of(reference or right_record(clips=clips), candidate, folder))
