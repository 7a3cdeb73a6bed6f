"""The names of a model's parameters and buffers without the names of what wraps it.

DistributedDataParallel, FSDP, `torch.compile`, activation checkpointing, Fabric, DeepSpeed and Megatron put a model
into modules of their own. A wrapper's attribute is no part of a name: `module.layers.0._orig_mod.weight` is
`layers.0.weight`."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

# Attributes that only wrappers have.
_ALWAYS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "_original_module"}
# The attribute of most wrappers, which other modules have, too: it counts as one where nothing is beside it.
_ALONE = "module"


@dataclass(frozen=True)
class NamedTensor:
    """A parameter or buffer with its name, and the module and attribute that hold it."""

    name: str
    module: nn.Module
    attribute: str

    @property
    def tensor(self) -> Tensor:
        value: Tensor | None = self.module._parameters.get(self.attribute)
        if value is None:
            value = self.module._buffers.get(self.attribute)
        if value is None:
            value = getattr(self.module, self.attribute)
        return value


def module_prefixes(root: nn.Module, prefix: str = "") -> dict[nn.Module, str]:
    """Returns the modules below `root` with the prefix of their tensors' names, from the first to the last."""
    prefixes: dict[nn.Module, str] = {}
    _add(root, prefix, prefixes)
    return prefixes


def _add(module: nn.Module, prefix: str, prefixes: dict[nn.Module, str]) -> None:
    if module in prefixes:
        return
    prefixes[module] = prefix
    for attribute, child in module._modules.items():
        if child is not None:
            _add(child, prefix if _is_wrapped(module, attribute) else f"{prefix}{attribute}.", prefixes)


def _is_wrapped(module: nn.Module, attribute: str) -> bool:
    if attribute in _ALWAYS:
        return True
    others = [name for name, child in module._modules.items() if child is not None and name != attribute]
    own = [name for name, value in module._parameters.items() if value is not None and name != "_flat_param"]
    return attribute == _ALONE and not others and not own


def named_parameters(prefixes: dict[nn.Module, str]) -> Iterator[NamedTensor]:
    """Yields the parameters that modules hold themselves. A tied parameter is yielded under each of its names."""
    for module, prefix in prefixes.items():
        for attribute, value in module._parameters.items():
            if value is not None:
                yield NamedTensor(prefix + attribute, module, attribute)


def named_buffers(prefixes: dict[nn.Module, str]) -> Iterator[NamedTensor]:
    """Yields the buffers that belong to the state of a model."""
    for module, prefix in prefixes.items():
        for attribute, value in module._buffers.items():
            if value is not None and attribute not in module._non_persistent_buffers_set:
                yield NamedTensor(prefix + attribute, module, attribute)
