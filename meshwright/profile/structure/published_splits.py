"""The splits that a model's authors publish with it: the tensor-parallel plans of the transformers library."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import gcd
from typing import Any

from torch import nn

from meshwright.profile.structure.splits import Split, SplitGroup, SplitKind

_KINDS: dict[str, SplitKind] = {"colwise": "column", "rowwise": "row", "embedding": "vocabulary"}


def with_published(model: nn.Module, groups: tuple[SplitGroup, ...]) -> tuple[SplitGroup, ...]:
    """The derived groups, marked where the model says the same; where it says otherwise, the model's."""
    published = published_splits(model)
    if not published:
        return groups
    kept: list[SplitGroup] = []
    done: set[str] = set()
    for group in groups:
        told = [split for split in group.splits if split.module in published]
        if any(not _agrees(split.kind, published[split.module]) for split in told):
            continue
        named = {split.module for split in told}
        splits = [replace(s, source="published") if s.module in named else s for s in group.splits]
        kept.append(replace(group, splits=tuple(splits)))
        done |= {split.module for split in group.splits}
    rest = {name: kind for name, kind in published.items() if name not in done}
    return (*kept, *_own_groups(model, rest))


def published_splits(model: nn.Module) -> dict[str, SplitKind]:
    """Modules by name; patterns are spelled out. What is neither a linear layer nor an embedding is left out."""
    found: dict[str, SplitKind] = {}
    for pattern, word in _entries(model):
        kind = next((kind for start, kind in _KINDS.items() if str(word).startswith(start)), None)
        expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        for name, module in model.named_modules():
            weight = getattr(module, "weight", None)
            if kind and expression.fullmatch(name) and isinstance(weight, nn.Parameter) and weight.dim() == 2:
                found[name] = kind
    return found


def _entries(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        plan = getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)
        if isinstance(plan, Mapping) and plan:
            for pattern, word in plan.items():
                yield (f"{name}.{pattern}" if name else pattern), word
            return  # the outermost model's plan names its parts too


def _agrees(derived: SplitKind, published: SplitKind) -> bool:
    return derived == published or (published == "column" and derived in ("heads", "vocabulary"))


def _own_groups(model: nn.Module, published: dict[str, SplitKind]) -> Iterator[SplitGroup]:
    """What could not be derived, by the module that holds it: layers under one roof are split together."""
    roofs: dict[str, list[str]] = {}
    for name in published:
        roofs.setdefault(name.rpartition(".")[0], []).append(name)
    for roof, names in roofs.items():
        splits = tuple(_split(model, name, published[name], names[0]) for name in names)
        heads = _heads(model.get_submodule(roof))
        degree = gcd(*(split.size for split in splits), *heads)
        if degree > 1:
            yield SplitGroup(names[0], degree, splits, *(heads or (None, None)))


def _split(model: nn.Module, name: str, kind: SplitKind, group: str) -> Split:
    module = model.get_submodule(name)
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    # An embedding's rows and a linear layer's outputs come first; transformers' Conv1D has them last.
    outputs = 0 if isinstance(module, nn.Linear | nn.Embedding) else 1
    dim = 1 - outputs if kind == "row" else outputs
    crosses = "" if kind == "column" else "all_reduce"
    size = weight.shape[dim]
    return Split(name, f"{name}.weight", kind, dim, size, group, crosses=crosses, source="published")


def _heads(roof: nn.Module) -> tuple[int, ...]:
    """Heads and key-value heads of an attention module, from its configuration."""
    config = getattr(roof, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    if "Attention" not in type(roof).__name__ or not isinstance(heads, int):
        return ()
    return heads, getattr(config, "num_key_value_heads", None) or heads
