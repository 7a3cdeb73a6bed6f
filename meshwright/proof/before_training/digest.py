"""The digest under which the result of a check is kept: of the model's code and shapes, of the plan's kind, and of the
versions of everything that runs them. Weights do not change it."""

import hashlib
import json
import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import nn

from meshwright.plan import Plan
from meshwright.proof.before_training.fake_step import FakeStep
from meshwright.proof.before_training.plan_kind import plan_kind
from meshwright.proof.before_training.training import Training
from meshwright.version import VERSION

_PACKAGE = Path(__file__).parents[2]
# The folders whose code decides what ranks compute under a plan, and how it is compared.
_EXECUTING = ("blocks", "collectives", "data", "parallel", "profile", "proof", "train")


def check_digest(training: Training, plan: Plan, step: FakeStep, device_type: str) -> str:
    """Returns the digest of a training under a small plan; `step` is its step on fake tensors."""
    parts = {
        "operators": step.operators,
        "code": step.code,
        "model": list(_described_modules(training.model)),
        "optimizer": _class_name(training.optimizer),
        "clips": training.clip_norm is not None,
        "plan": plan_kind(plan),
        "device": device_type,
        "versions": [torch.__version__, platform.python_version(), VERSION, package_digest()],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _described_modules(model: nn.Module) -> Iterator[list[object]]:
    """Yields the name and class of every module, and its parameters and buffers with their shapes."""
    for name, module in model.named_modules():
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        shapes = [[key, list(value.shape), str(value.dtype), value.requires_grad] for key, value in tensors]
        yield [name, _class_name(module), shapes]


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


@cache
def package_digest() -> str:
    """The digest of this package's files that execute plans and compare them."""
    digest = hashlib.sha256()
    for folder in _EXECUTING:
        for file in sorted((_PACKAGE / folder).rglob("*.py")):
            digest.update(file.relative_to(_PACKAGE).as_posix().encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
