"""Random problems for the search: a model, a cluster, a batch, what plans may change, and constraints. Nothing here
knows how the search works.

    models       small ones of our own, of random sizes; with `ready`, also ready jobs, `hf:` and, if installed, `timm:`
    clusters     1 to 1,024 devices, also 3, 5, 6, 12 and 48: GPUs of data centres and of consumers, CPUs, unequal ones
    batches      powers of two, multiples of the devices, primes, 480
    constraints  none in half of the problems; otherwise an avoided axis or feature, a fixed field, or less memory
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.auto.inputs import model_planning_inputs, planning_inputs
from meshwright.cli.ready_jobs import ready_jobs
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find_cluster
from meshwright.errors import InputError
from meshwright.job import load_job
from meshwright.plan_fields.constraints import NONE, Constraints, make_constraints
from meshwright.planner.constraints.apply import constrained, unconstrained
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.profiles import Profiles
from meshwright.train.job_parts import JobParts
from meshwright.workloads import vision
from meshwright.workloads.text.decoder import Decoder, NextTokenLoss
from meshwright.zoo.job_text import job_text

Numerics = Literal["same", "rounding", "changes"]
_DEVICES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 48, 64)
_MANY_DEVICES = (128, 256, 512, 1024)
_GPUS = ("H100", "A100-80GB", "V100-16GB", "RTX4090", "L4", "H200")
_CPUS = ("Xeon-8380", "EPYC-7763")
_UNEQUAL = ("4xA100-80GB+4xV100-16GB", "8xH100+8xA100-80GB", "1xRTX4090+1xL4")
_READY = ("gpt", "bert", "resnet18", "mnist", "two_tower", "unet")
_NAMED = ("hf:gpt2", "hf:bert", "timm:vit_tiny_patch16_224")
_PRIMES = (7, 31, 127, 257)


@dataclass(frozen=True)
class Problem:
    """What is searched for, in words that make the same problem again."""

    model: str
    cluster: str
    batch: int
    allow: Numerics
    constraints: Constraints

    def describe(self) -> str:
        kept = f", {self.constraints.describe()}" if self.constraints else ""
        return f"{self.model}, {self.batch} samples on {self.cluster}, allow {self.allow}{kept}"

    def inputs(self) -> tuple[PlanningInputs, Profiles]:
        """The inputs of the search, and the profiles of the model. Profiles of a model are traced once."""
        cluster = find_cluster(self.cluster)
        parts = _model_parts(self.model)
        inputs, profiles = parts(cluster, self.batch, self.allow)
        return constrained(unconstrained(inputs), self.constraints), profiles


def draw_problem(seed: int, number: int, ready: bool = True, large: bool = True) -> Problem:
    """Returns the problem with this number. With `ready`, the model may also be a ready job or one of a library, whose
    tracing takes seconds. With `large`, the cluster may have over 64 devices."""
    random = Random(f"{seed}/{number}")
    cluster = _draw_cluster(random, large)
    devices = find_cluster(cluster).device_count
    kind = find_cluster(cluster).kind
    model = _draw_model(random, ready, kind)
    batch = _draw_batch(random, devices)
    allow: Numerics = random.choice(("rounding", "rounding", "changes", "same"))
    return Problem(model, cluster, batch, allow, _draw_constraints(random, devices, kind))


def _draw_cluster(random: Random, large: bool) -> str:
    kind = random.choices(("gpu", "cpu", "unequal"), (8, 1.5, 1))[0]
    if kind == "unequal":
        return random.choice(_UNEQUAL)
    if kind == "cpu":
        return f"{random.choice((1, 2, 3, 4, 8))}x{random.choice(_CPUS)}"
    devices = random.choice((*_DEVICES, *_MANY_DEVICES) if large else _DEVICES)
    gpu = random.choice(_GPUS)
    link = random.choice(("", "", "@100G", "@Ethernet-10G")) if devices > 8 and devices % 8 == 0 else ""
    return f"{devices // 8}x8x{gpu}{link}" if devices > 8 and devices % 8 == 0 else f"{devices}x{gpu}"


def _draw_batch(random: Random, devices: int) -> int:
    options = (
        480,
        random.choice(_PRIMES),
        2 ** random.randrange(0, 11),
        devices * random.choice((1, 2, 3, 5, 8, 16, 60)),
    )
    return random.choice(options)


def _draw_constraints(random: Random, devices: int, kind: str) -> Constraints:
    drawn = random.choices(("none", "avoid", "memory", "fix"), (6, 2, 2, 2))[0]
    if drawn == "avoid":
        return make_constraints(avoid=[random.choice(("pipeline", "tensor", "recompute", "compile", "shard"))])
    if drawn == "memory":
        return make_constraints(max_memory=f"{random.choice((2, 4, 8, 20))}GB")
    if drawn == "fix":
        fields: list[dict[str, Any]] = [{"memory.recompute": "none"}, {"memory.accumulation": 1}]
        if devices > 1:
            fields.append({"axes.shard": devices})
        if kind == "cuda":
            fields.append({"compute.compile": "none"})
        return make_constraints(random.choice(fields))
    return NONE


def _draw_model(random: Random, ready: bool, kind: str) -> str:
    if ready and random.random() < 0.3:
        named = [name for name in _NAMED if not name.startswith("timm") or find_spec("timm")]
        return random.choice((*_READY, *named))
    if kind == "cpu":
        return random.choice(("perceptron 256 3", "decoder 2 128 64 500", "perceptron 1024 4"))
    return random.choice(
        (
            "decoder 4 512 256 1000",
            "decoder 12 1024 512 32000",
            "decoder 24 4096 2048 32000",
            "decoder 6 768 1024 50257",
            "perceptron 4096 6",
            "images resnet18",
            "images vgg16",
        )
    )


_Make = Callable[[Cluster, int, Numerics], tuple[PlanningInputs, Profiles]]


@cache
def _model_parts(name: str) -> _Make:
    """Returns a function that makes the inputs of a search for this model."""
    kind, *words = name.split()
    if not words:
        return _of_job(name)
    model, sample, loss = _own_model(kind, words)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    profiles: dict[str, Profiles] = {}

    def make(cluster: Cluster, batch: int, allow: Numerics) -> tuple[PlanningInputs, Profiles]:
        inputs, traced = model_planning_inputs(
            model, sample, cluster, global_batch=batch, loss=loss, optimizer=optimizer, allow=allow
        )
        return inputs, profiles.setdefault(cluster.kind, traced)

    return make


def _own_model(kind: str, words: list[str]) -> tuple[nn.Module, Any, Any]:
    with torch.device("meta"):
        if kind == "decoder":
            layers, hidden, sequence, vocabulary = map(int, words)
            decoder = Decoder(
                layers=layers, hidden=hidden, heads=hidden // 64, sequence=sequence, vocabulary=vocabulary, tied=False
            )
            tokens = torch.empty(2, sequence, dtype=torch.long)
            return decoder, (tokens, tokens), NextTokenLoss()
        targets = torch.empty(2, dtype=torch.long)
        if kind == "images":
            model: nn.Module = getattr(vision, words[0])(classes=1000)
            return model, (torch.empty(2, 3, 224, 224), targets), F.cross_entropy
        width, depth = map(int, words)
        layers_of = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*layers_of, nn.Linear(width, 10)), (torch.empty(2, width), targets), F.cross_entropy


def _of_job(name: str) -> _Make:
    job = load_job(name, [], job_text(name)) if ":" in name else load_job(_ready_job(name), [])
    parts = JobParts(job)

    def make(cluster: Cluster, batch: int, allow: Numerics) -> tuple[PlanningInputs, Profiles]:
        inputs, profiles = planning_inputs(parts, cluster, allow=allow, top=5, constraints=NONE)
        return _with_batch(inputs, batch), profiles

    return make


def _with_batch(inputs: PlanningInputs, batch: int) -> PlanningInputs:
    return replace(inputs, global_batch=batch)


def _ready_job(name: str) -> Path:
    if name not in ready_jobs():
        raise InputError(f"there is no ready job '{name}'")
    return ready_jobs()[name]
