"""How divided weights reach a model's own code: while a module runs, parts stand in the place of its parameters.

The module's `forward` is wrapped rather than hooked: so it also holds where a block is computed again in the backward
pass, and inside of what FSDP does before and behind a module.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch import nn

from meshwright.parallel.exchange import Team, averaged
from meshwright.parallel.tensor.shard_view import Kind, ShardSpec, ShardView, gathered


@dataclass(frozen=True, eq=False)
class Slot:
    """A parameter of a module, and what stands in its place: a part of a tensor of `shape`."""

    owner: nn.Module
    name: str
    mark: ShardSpec
    shape: tuple[int, ...]


def swap_while_running(
    module: nn.Module, name: str, slots: Sequence[Slot], teams: Sequence[Team], made_whole: tuple[Kind, ...]
) -> None:
    """From now on the slots hold parts while `module` runs. Parts in its output of the kinds `made_whole` are made
    whole."""
    once: Callable[..., Any] = module.forward

    @wraps(once)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with _swapped(slots), _running(name, teams):
            output = once(*args, **kwargs)
            return gathered(output, made_whole) if made_whole else output

    module.forward = forward


@contextmanager
def _swapped(slots: Sequence[Slot]) -> Iterator[None]:
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for slot in slots:
            parameters: dict[str, Any] = slot.owner._parameters
            held = parameters[slot.name]
            if not isinstance(held, ShardView):  # a module around this one may have done it
                local = averaged(held, slot.mark.team) if slot.mark.team.axis == "replicate" else held
                parameters[slot.name] = ShardView(local, slot.mark, slot.shape)
                before.append((parameters, slot.name, held))
        yield
    finally:
        for parameters, name, held in before:
            parameters[name] = held


@contextmanager
def _running(name: str, teams: Sequence[Team]) -> Iterator[None]:
    for team in teams:
        team.running.append(name)
    try:
        yield
    finally:
        for team in teams:
            team.running.pop()


def without_fused_paths(module: nn.Module) -> None:
    """torch's encoder packs padded batches for a fused kernel in evaluation, before a layer could say it is split."""
    if isinstance(module, nn.TransformerEncoder):
        module.use_nested_tensor = False


def has_fused_path(module: nn.Module) -> bool:
    """Whether it hands its children's weights to a kernel in evaluation, unless they are no plain tensors."""
    return isinstance(module, nn.TransformerEncoderLayer)
