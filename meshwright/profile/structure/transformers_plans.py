"""Splits from the tensor-parallel plans of the transformers library, which its models publish as `tp_plan`.

Such a plan maps module names with wildcards to "colwise", "rowwise" and the like. If a model has a plan, it is compared
with the splits that `splits.py` derives, and it replaces derived splits that disagree with it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import gcd
from typing import Any

from torch import nn

from meshwright.profile.structure.splits import ParameterSplit, SplitGroup, SplitKind

_KINDS: dict[str, SplitKind] = {"colwise": "column", "rowwise": "row", "embedding": "vocabulary"}
_GATHERED = ("_gather_output", "_rep")  # endings of the words for layers whose output every rank needs in full


def with_transformers_splits(model: nn.Module, groups: tuple[SplitGroup, ...]) -> tuple[SplitGroup, ...]:
    """Returns `groups`, which were derived from the model, combined with the model's plan. A group that agrees with the
    plan is kept, and its splits that are in the plan are marked as `published`. A group that contradicts the plan is
    replaced by groups from the plan. Modules that only the plan splits are added. Without a plan, `groups` is returned
    unchanged."""
    published, gathered = _published_kinds(model)
    if not published:
        return groups
    confirmed: list[SplitGroup] = []
    covered: set[str] = set()
    for group in groups:
        in_plan = {split.module for split in group.splits if split.module in published}
        if any(not _agrees(s.kind, published[s.module]) for s in group.splits if s.module in in_plan):
            continue
        splits = [replace(s, source="published") if s.module in in_plan else s for s in group.splits]
        confirmed.append(replace(group, splits=tuple(splits)))
        covered |= {split.module for split in group.splits}
    remaining = {name: kind for name, kind in published.items() if name not in covered}
    return (*confirmed, *_published_groups(model, remaining, gathered))


def _published_kinds(model: nn.Module) -> tuple[dict[str, SplitKind], frozenset[str]]:
    """Returns the kind of split in the model's plan for each module name, and the names of the modules whose output is
    gathered. Modules without a two-dimensional weight are skipped."""
    kinds: dict[str, SplitKind] = {}
    gathered: set[str] = set()
    for pattern, word in _plan_entries(model):
        kind = next((kind for start, kind in _KINDS.items() if str(word).startswith(start)), None)
        expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        for name, module in model.named_modules():
            weight = getattr(module, "weight", None)
            if kind and expression.fullmatch(name) and isinstance(weight, nn.Parameter) and weight.dim() == 2:
                kinds[name] = kind
                gathered |= {name} if str(word).endswith(_GATHERED) else set()
    return kinds, frozenset(gathered)


def _plan_entries(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the entries of the outermost plan in the model as (name pattern, word). That plan includes the plans of
    inner modules."""
    for name, module in model.named_modules():
        plan = getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)
        if isinstance(plan, Mapping) and plan:
            for pattern, word in plan.items():
                yield (f"{name}.{pattern}" if name else pattern), word
            return


def _agrees(derived: SplitKind, published: SplitKind) -> bool:
    return derived == published or (published == "column" and derived in ("heads", "vocabulary"))


def _published_groups(
    model: nn.Module, published: dict[str, SplitKind], gathered: frozenset[str]
) -> Iterator[SplitGroup]:
    """Yields groups of the modules in `published`, which only the plan splits. Modules with the same parent are one
    group."""
    children: dict[str, list[str]] = {}
    for name in published:
        children.setdefault(name.rpartition(".")[0], []).append(name)
    for parent, names in children.items():
        splits = tuple(_published_split(model, name, published[name], names[0], gathered) for name in names)
        heads = _configured_heads(model.get_submodule(parent))
        degree = gcd(*(split.size for split in splits), *heads)
        if degree > 1:
            yield SplitGroup(names[0], degree, splits, *(heads or (None, None)))


def _published_split(
    model: nn.Module, name: str, kind: SplitKind, group: str, gathered: frozenset[str]
) -> ParameterSplit:
    module = model.get_submodule(name)
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    # An embedding's rows and a linear layer's outputs are dimension 0. The library's `Conv1D` has its outputs last.
    output_dim = 0 if isinstance(module, nn.Linear | nn.Embedding) else 1
    dim = 1 - output_dim if kind == "row" else output_dim
    communication = ("all_gather" if name in gathered else "") if kind == "column" else "all_reduce"
    return ParameterSplit(
        name, f"{name}.weight", kind, dim, weight.shape[dim], group, communication=communication, source="published"
    )


def _configured_heads(parent: nn.Module) -> tuple[int, ...]:
    """The numbers of heads and of key-value heads in the configuration of an attention module; empty for other
    modules."""
    config = getattr(parent, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    if "Attention" not in type(parent).__name__ or not isinstance(heads, int):
        return ()
    return heads, getattr(config, "num_key_value_heads", None) or heads
