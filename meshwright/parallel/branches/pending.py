"""`Pending`: a tensor that another rank is still computing. It knows its shape and waits for its numbers when they are
first used, so that a rank goes on with its own work until then."""

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

# What is asked of a tensor without touching its numbers.
_WORDS = (
    "shape size dim ndim ndimension dtype device layout numel nelement element_size itemsize nbytes stride names "
    "is_contiguous is_floating_point is_complex is_signed is_cuda is_cpu is_meta is_sparse is_quantized is_nested "
    "get_device requires_grad is_leaf grad_fn grad output_nr register_hook retain_grad _version __len__ __hash__"
)
_QUESTIONS = frozenset(_WORDS.split())


@dataclass
class Delivery:
    """A broadcast under way, with the memory that it reads or writes."""

    work: dist.Work
    memory: Tensor
    done: bool = field(default=False)

    def wait(self) -> None:
        if not self.done:
            self.work.wait()
            self.done = True


class Pending(Tensor):
    """Stands for `held`, whose numbers are there once its delivery is done. Both are outputs of one autograd node:
    gradients take the same way, whichever of the two a function was given."""

    held: Tensor
    delivery: Delivery

    @staticmethod
    def __new__(cls: type["Pending"], held: Tensor, delivery: Delivery) -> "Pending":
        made: Pending = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=held.device
        )
        made.held, made.delivery = held, delivery
        return made

    def __init__(self, held: Tensor, delivery: Delivery) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = plain((args, kwargs or {}), wait=_name(func) not in _QUESTIONS)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What comes behind torch's function protocol: a user's own autograd function."""
        args, kwargs = plain((args, kwargs or {}))
        return func(*args, **kwargs)


def plain(tree: Any, *, wait: bool = True) -> Any:
    """The same tree with ordinary tensors; without `wait` their numbers may be missing yet."""

    def made(leaf: Any) -> Any:
        if not isinstance(leaf, Pending):
            return leaf
        if wait:
            leaf.delivery.wait()
        return leaf.held

    return tree_map(made, tree)


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    return func.__self__.__name__ if name == "__get__" else name
