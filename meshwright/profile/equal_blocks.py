"""Finds consecutive blocks of a model that are equal. Tracing some of them is then enough to know the cost of all.

Three of them are traced: the first, one in the middle and the last. The traced middle block stands for all blocks
between the first and the last, because each of these lies between two equal neighbours as well.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

_FEWEST = 5  # with fewer consecutive equal blocks, skipping some is not worth it
# Attributes in which a block stores its own position. Equal blocks may differ in them.
_POSITION_ATTRIBUTES = ("layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "index", "idx")


@dataclass(frozen=True)
class EqualBlocks:
    """At least five consecutive children of the module `container` that are equal. `blocks` are their full names."""

    container: str
    blocks: tuple[str, ...]

    @property
    def first(self) -> str:
        return self.blocks[0]

    @property
    def middle(self) -> str:
        """The block that is traced in place of all blocks between the first and the last."""
        return self.blocks[1]

    @property
    def last(self) -> str:
        return self.blocks[-1]

    @property
    def skipped(self) -> tuple[str, ...]:
        """The blocks that are not traced because the middle block stands for them."""
        return self.blocks[2:-1]


def find_equal_blocks(model: nn.Module) -> tuple[EqualBlocks, ...]:
    """Returns every series of at least five consecutive equal children of a `ModuleList` or `Sequential`. Containers
    that lie inside of a container with such a series are not searched."""
    rows: list[EqualBlocks] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or any(_is_in_container(name, row) for row in rows):
            continue
        prefix = f"{name}." if name else ""
        children = [f"{prefix}{key}" for key in module._modules]
        rows.extend(EqualBlocks(name, tuple(children[begin:end])) for begin, end in _equal_children(list(module)))
    return tuple(rows)


def skipped_blocks(equal_blocks: tuple[EqualBlocks, ...]) -> tuple[str, ...]:
    """The names of all blocks in `equal_blocks` that are not traced."""
    return tuple(name for row in equal_blocks for name in row.skipped)


def remove_skipped_blocks(model: nn.Module, equal_blocks: tuple[EqualBlocks, ...]) -> None:
    """Removes the skipped blocks from the model, in place. Children whose names are numbers are renumbered."""
    for row in equal_blocks:
        container = model.get_submodule(row.container)
        skipped = {name.rpartition(".")[2] for name in row.skipped}
        remaining = [(key, child) for key, child in container._modules.items() if key not in skipped]
        is_numbered = all(key.isdigit() for key, _ in remaining)
        container._modules.clear()
        for number, (key, child) in enumerate(remaining):
            container._modules[str(number) if is_numbered else key] = child


def _is_in_container(name: str, row: EqualBlocks) -> bool:
    return name.startswith(f"{row.container}.") or (not row.container and name != "")


def _equal_children(children: list[nn.Module]) -> Iterator[tuple[int, int]]:
    """Yields the ranges [begin, end) of at least `_FEWEST` consecutive children that are equal."""
    seen: set[int] = set()
    start = 0
    signatures = [_signature(child, seen) for child in children]
    for end in range(1, len(children) + 1):
        if end == len(children) or signatures[end] != signatures[start]:
            if end - start >= _FEWEST:
                yield start, end
            start = end


def _signature(block: nn.Module, seen: set[int]) -> Any:
    """Returns a value that is equal for blocks with the same modules, settings and shapes, which therefore cost the
    same. A block that shares a parameter with an earlier block equals no other block. `seen` contains the ids of the
    parameters of earlier blocks, and this function adds those of `block`."""
    shares_parameter = any(id(parameter) in seen for parameter in block.parameters())
    seen.update(id(parameter) for parameter in block.parameters())
    if shares_parameter:
        return object()
    return tuple((name, type(module), _settings(module)) for name, module in block.named_modules())


def _settings(module: nn.Module) -> Any:
    attributes = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, int | float | str | tuple | bool | None)
        and not key.startswith("_")
        and key not in _POSITION_ATTRIBUTES
    }
    tensors = [
        (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]
        if tensor is not None
    ]
    return tuple(sorted((key, repr(value)) for key, value in attributes.items())), tuple(tensors)
