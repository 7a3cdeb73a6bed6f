"""The private interfaces of torch that this package uses, in one place. Seen to work on torch 2.11, 2.13 and 2.15."""

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "DataDependentOutputException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "answer_tensor_query",
    "backward_node_number",
    "custom_function_name",
    "forward_node_number",
    "operator_arguments",
    "operator_name",
    "operator_packet",
    "storage_address",
    "storage_of",
    "tree_leaves",
    "tree_map",
    "unwrapped",
]


def operator_packet(func: Any) -> Any:
    """The operator of which `func` is one overload, such as `torch.ops.aten.add`."""
    return func._overloadpacket


def operator_name(func: Any) -> str:
    """The name of an operator without namespace and overload, such as "add"."""
    name: str = func._overloadpacket.__name__
    return name


def operator_arguments(func: Any) -> Sequence[Any]:
    """The declared arguments of an operator, with name, default value and aliasing."""
    arguments: Sequence[Any] = func._schema.arguments
    return arguments


def answer_tensor_query(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the result of `func`, an operator of torch's namespace `prim` such as the query for a tensor's device.
    The device of a fake tensor is read from its attribute, which is faster: autograd queries it several times per
    operator."""
    if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
        return args[0].fake_device
    return func(*args, **kwargs)


def forward_node_number() -> int:
    """Sequence number of the autograd node of the forward operator that is being dispatched. A dispatch mode runs after
    autograd has created this node, so it is the node that was numbered last."""
    return torch.autograd._get_sequence_nr() - 1


def backward_node_number() -> int | None:
    """Sequence number of the autograd node whose backward function runs now, or None if no backward function runs."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def custom_function_name(tensor: torch.Tensor) -> str:
    """The name of the custom autograd function that has returned the tensor; empty if none has."""
    node = tensor.grad_fn
    return node.name().removesuffix("Backward") if isinstance(node, torch.autograd.function.BackwardCFunction) else ""


def storage_address(storage: torch.UntypedStorage) -> int:
    """A number that identifies a storage as long as something references the storage. It exists for fake tensors,
    too."""
    return storage._cdata


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor within the wrappers of `torch.func` (`vmap`, `jvp`, `grad`), which operators see and which has the
    memory; the tensor itself if it has no wrapper."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor; None for one that has none of its own, as sparse tensors."""
    if tensor.layout != torch.strided:
        return None
    return unwrapped(tensor).untyped_storage()
