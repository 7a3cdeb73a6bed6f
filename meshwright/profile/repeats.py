"""Which blocks of a model are equal, so that one of them can be traced for all.

Of a run of equal blocks three are kept: the first, one in the middle and the last. What the middle one does between
its two neighbours is what each of the others in the middle does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

_SHORTEST = 5
_NUMBERS = ("layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "index", "idx")  # a block's own place


@dataclass(frozen=True)
class Run:
    """Equal children of the module `container`, in a row; `blocks` are their full names."""

    container: str
    blocks: tuple[str, ...]

    @property
    def first(self) -> str:
        return self.blocks[0]

    @property
    def middle(self) -> str:
        return self.blocks[1]

    @property
    def last(self) -> str:
        return self.blocks[-1]

    @property
    def left_out(self) -> tuple[str, ...]:
        """The blocks that the middle one stands for."""
        return self.blocks[2:-1]


def find_runs(model: nn.Module) -> tuple[Run, ...]:
    """The outermost runs of equal blocks that are worth shortening."""
    runs: list[Run] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or any(_inside(name, run) for run in runs):
            continue
        prefix = f"{name}." if name else ""
        keys = [f"{prefix}{key}" for key in module._modules]
        runs.extend(Run(name, tuple(keys[begin:end])) for begin, end in _equal_children(list(module)))
    return tuple(runs)


def left_out(runs: tuple[Run, ...]) -> tuple[str, ...]:
    return tuple(name for run in runs for name in run.left_out)


def shorten(model: nn.Module, runs: tuple[Run, ...]) -> None:
    """Takes all but three blocks of each run out of the model, in place."""
    for run in runs:
        container = model.get_submodule(run.container)
        gone = {name.rpartition(".")[2] for name in run.left_out}
        stay = [(key, child) for key, child in container._modules.items() if key not in gone]
        numbered = all(key.isdigit() for key, _ in stay)
        container._modules.clear()
        for number, (key, child) in enumerate(stay):
            container._modules[str(number) if numbered else key] = child


def _inside(name: str, run: Run) -> bool:
    return name.startswith(f"{run.container}.") or (not run.container and name != "")


def _equal_children(children: list[nn.Module]) -> Iterator[tuple[int, int]]:
    seen: set[int] = set()
    start = 0
    signatures = [_signature(child, seen) for child in children]
    for end in range(1, len(children) + 1):
        if end == len(children) or signatures[end] != signatures[start]:
            if end - start >= _SHORTEST:
                yield start, end
            start = end


def _signature(block: nn.Module, seen: set[int]) -> Any:
    """What makes two blocks cost the same. A block that shares a parameter with an earlier one is like no other."""
    shared = any(id(parameter) in seen for parameter in block.parameters())
    seen.update(id(parameter) for parameter in block.parameters())
    if shared:
        return object()
    return tuple((name, type(module), _settings(module)) for name, module in block.named_modules())


def _settings(module: nn.Module) -> Any:
    plain = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, int | float | str | tuple | bool | None)
        and not key.startswith("_")
        and key not in _NUMBERS
    }
    tensors = [
        (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]
        if tensor is not None
    ]
    return tuple(sorted((key, repr(value)) for key, value in plain.items())), tuple(tensors)
