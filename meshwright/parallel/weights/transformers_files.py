"""Finds out which tensors of a model of transformers the tensors of its files become: some are renamed, and some are
converted, such as the experts of a layer, which are stacked. The rules are those of transformers' `from_pretrained`."""

import sys
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.user.call import load

_LOADING = "transformers.core_model_loading"


@dataclass(frozen=True)
class Conversion:
    """Tensors of the files that become one or several tensors of the model together. `target` is the name of the first
    of these, `sources` has the name of each tensor in the files and the pattern of transformers that matched it."""

    model: Any
    converter: Any
    target: str
    sources: list[tuple[str, str]] = field(default_factory=list)

    def convert(self, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Returns the tensors of the model by name. `read` returns a tensor of the files."""
        converter = deepcopy(self.converter)
        for name, pattern in self.sources:
            converter.add_tensor(self.target, name, pattern, read(name))
        converted = converter.convert(self.target, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


@dataclass(frozen=True)
class MatchedFiles:
    """`names` has the names in the files by name in the model, and `conversions` what is converted. A tensor that the
    model does not have is in `names` under its name in the files."""

    names: dict[str, str]
    conversions: list[Conversion]


def match_files(model: nn.Module, model_state: Mapping[str, Any], file_names: Iterable[str]) -> MatchedFiles:
    """Returns which tensors of the model the tensors of the files become. For models that are not of transformers, no
    name is changed."""
    rules = _Rules(model)
    names: dict[str, str] = {}
    conversions: dict[str, Conversion] = {}
    for file_name in rules.sort(file_names):
        renamed, pattern = rules.rename(file_name)
        name = _with_prefix(renamed, model, model_state)
        if name not in model_state:
            name, pattern = _with_prefix(file_name, model, model_state), None
        if pattern is None:
            names[name] = file_name
        else:
            conversion = conversions.setdefault(name, Conversion(model, rules.converters[pattern], name))
            conversion.sources.append((file_name, pattern))
    return MatchedFiles(names, list(conversions.values()))


class _Rules:
    """The rules by which transformers renames and converts tensors. There are none for other models, and for versions
    of transformers without such rules."""

    def __init__(self, model: nn.Module) -> None:
        self.converters: dict[str, Any] = {}
        self._rename: Any = None
        if "transformers" not in sys.modules or not isinstance(model, load("transformers:PreTrainedModel")):
            return
        try:
            rules = load("transformers.conversion_mapping:get_model_conversion_mapping")(model)
            self._rename, self._sort_key = load(f"{_LOADING}:rename_source_key"), load(f"{_LOADING}:dot_natural_key")
        except InputError:  # transformers before version 5
            return
        converters = [rule for rule in rules if isinstance(rule, load(f"{_LOADING}:WeightConverter"))]
        self._arguments = [rule for rule in rules if rule not in converters], converters
        self.converters = {pattern: rule for rule in converters for pattern in rule.source_patterns}

    def sort(self, names: Iterable[str]) -> list[str]:
        """Returns the names in the order in which the rules need them: expert 2 before expert 10."""
        return list(names) if self._rename is None else sorted(names, key=self._sort_key)

    def rename(self, name: str) -> tuple[str, str | None]:
        """Returns the name in the model, and the pattern of the converter; None if the tensor is not converted."""
        if self._rename is None:
            return name, None
        renamed: tuple[str, str | None] = self._rename(name, *self._arguments)
        return renamed


def _with_prefix(name: str, model: nn.Module, model_state: Mapping[str, Any]) -> str:
    """Returns the name with or without the prefix of the base model (`model.`), whichever the model has; `name` if it
    has neither."""
    prefix = getattr(model, "base_model_prefix", None)
    if name in model_state or not isinstance(prefix, str) or not prefix:
        return name
    for other in (f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
        if other in model_state:
            return other
    return name
