"""All private interfaces of torch that meshwright/proof uses, in one file. They were seen to work on torch
2.11, 2.13 and 2.15."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.modules import batchnorm, dropout
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

ModuleType = TypeVar("ModuleType", bound=nn.Module)

# The base classes of all of torch's BatchNorm and Dropout modules.
AnyBatchNorm = batchnorm._BatchNorm
AnyDropout = dropout._DropoutNd

# The operator that `Tensor.to` calls when it converts a dtype.
TO_COPY = torch.ops.aten._to_copy.default


def in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def apply_to_tensors(module: ModuleType, change: Callable[[Tensor], Tensor]) -> ModuleType:
    """Replaces every parameter and buffer of a module by what the function returns for it, in place."""
    return module._apply(change)


def new_parametrized(kind: type[ModuleType], names: list[str]) -> ModuleType:
    """Returns a module of this class whose weights of these names are parametrized, still without any state."""
    module = kind.__new__(kind)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


@contextmanager
def backward_passes_in(context: AbstractContextManager[Any]) -> Iterator[None]:
    """Within this context, autograd's engine runs within the other one, which can be entered again and again."""
    module: Any = torch.autograd
    run_engine = module._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        with context:
            return run_engine(*args, **kwargs)

    module._engine_run_backward = run
    try:
        yield
    finally:
        module._engine_run_backward = run_engine


def process_groups() -> list[dist.ProcessGroup]:
    """The process groups that this process is in at the moment."""
    return list(distributed_c10d._world.pg_map) if dist.is_initialized() else []


@contextmanager
def refuse_collectives() -> Iterator[None]:
    """Within this context, a collective raises an error. It would wait forever in code that one rank runs alone."""
    original = distributed_c10d._rank_not_in_group  # every collective asks this first

    def refuse(group: Any) -> bool:
        raise RuntimeError("the model communicates with other ranks, so it cannot run on one rank alone")

    distributed_c10d._rank_not_in_group = refuse
    try:
        yield
    finally:
        distributed_c10d._rank_not_in_group = original
