"""`Settings`: what must be set alike on the ranks of a session besides the weights: training or evaluation mode of
modules, which parameters are trained, hooks that change values, and the optimizer's options. A loop or a callback that
changes one of them on some ranks only trains another model, also where the weights stay equal."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from meshwright.errors import InputError
from meshwright.messages.exchange import all_gather_values
from meshwright.parallel.model import ParallelModel

HOOK = "the hook on "  # how the names of hooks begin, which only some ranks may have


@dataclass(frozen=True)
class Settings:
    """The settings of one rank: values as text, by what they are of."""

    values: Mapping[str, str]

    @cached_property
    def number(self) -> int:
        """A number that differs if the settings do."""
        text = json.dumps(sorted(self.values.items()))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")

    def compare(self, group: dist.ProcessGroup, ranks: tuple[int, ...], step: int) -> None:
        """Raises an `InputError` on all ranks if a setting that two of them have differs. All ranks of the group call
        this together. Modules that only some ranks have are not compared."""
        first, *others = all_gather_values(dict(self.values), group)
        for rank, other in zip(ranks[1:], others, strict=True):
            hooks = {name for name in {*first, *other} if name.startswith(HOOK)}
            first, other = {**dict.fromkeys(hooks, "none"), **first}, {**dict.fromkeys(hooks, "none"), **other}
            differing = [name for name in first if name in other and other[name] != first[name]]
            if differing:
                raise InputError(_describe(differing, first, other, ranks[0], rank, step))


def read_settings(parallel: ParallelModel, optimizer: torch.optim.Optimizer, hooks: Mapping[str, str]) -> Settings:
    """Returns the settings of this rank. `hooks` are those that change values, by what they are registered with."""
    return Settings({**dict(_settings_of(parallel, optimizer)), **hooks})


def _settings_of(parallel: ParallelModel, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str]]:
    for name, module in parallel.module.named_modules():
        yield f"the mode of {name or 'the model'}", "train()" if module.training else "eval()"
    for name, parameter in parallel.parameters().items():
        yield f"requires_grad of {name}", str(parameter.requires_grad)
    for number, group in enumerate(optimizer.param_groups):
        for key in optimizer.defaults.keys() & group.keys():
            if _is_plain(group[key]):
                yield f"{key} of the optimizer's group {number}", str(group[key])


def _is_plain(value: Any) -> bool:
    """Whether an option is a number or a text, and not a tensor, which the host would wait for."""
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _describe(
    differing: list[str], first: Mapping[str, str], other: Mapping[str, str], a: int, b: int, step: int
) -> str:
    name = differing[0]
    more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
    return (
        f"{name} is {first[name]} on rank {a} and {other[name]} on rank {b}{more}, at step {step}: the loop or a"
        " callback has changed it on some ranks only, and the ranks train different models: make the same change on all"
        " ranks"
    )
