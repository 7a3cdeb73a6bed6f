"""`PendingTensor`: a tensor that another rank is still computing. Its shape is known at once; the first use of its
values waits for their broadcast, so that a rank goes on with its own work until then."""

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.torch_private import make_wrapper_subclass, tree_map

# Names of tensor attributes and methods that do not touch values.
_NAMES = (
    "shape size dim ndim ndimension dtype device layout numel nelement element_size itemsize nbytes stride names "
    "is_contiguous is_floating_point is_complex is_signed is_cuda is_cpu is_meta is_sparse is_quantized is_nested "
    "get_device requires_grad is_leaf grad_fn grad output_nr register_hook retain_grad _version __len__ __hash__"
)
_METADATA = frozenset(_NAMES.split())


@dataclass
class PendingBroadcast:
    """A broadcast that has begun, with the memory that it reads or writes."""

    work: dist.Work
    memory: Tensor
    is_done: bool = field(default=False)

    def wait(self) -> None:
        if not self.is_done:
            self.work.wait()
            self.is_done = True


class PendingTensor(Tensor):
    """Stands for `received`, whose values are there once `broadcast` is done.

    Both are outputs of one autograd node, so gradients flow the same way whichever of the two a function was given.
    """

    received: Tensor
    broadcast: PendingBroadcast

    @staticmethod
    def __new__(cls: type["PendingTensor"], received: Tensor, broadcast: PendingBroadcast) -> "PendingTensor":
        pending: PendingTensor = make_wrapper_subclass(
            cls, received.shape, strides=received.stride(), dtype=received.dtype, device=received.device
        )
        pending.received, pending.broadcast = received, broadcast
        return pending

    def __init__(self, received: Tensor, broadcast: PendingBroadcast) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = resolve_pending((args, kwargs or {}), wait=_name(func) not in _METADATA)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Reached by a user's autograd function, which does not pass through `__torch_function__`."""
        args, kwargs = resolve_pending((args, kwargs or {}))
        return func(*args, **kwargs)


def resolve_pending(tree: Any, *, wait: bool = True) -> Any:
    """The same tree with ordinary tensors in the place of pending ones. Without `wait` their values may be missing."""

    def resolve(leaf: Any) -> Any:
        if not isinstance(leaf, PendingTensor):
            return leaf
        if wait:
            leaf.broadcast.wait()
        return leaf.received

    return tree_map(resolve, tree)


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    return func.__self__.__name__ if name == "__get__" else name
