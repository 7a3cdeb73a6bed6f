"""The private interfaces of torch that training uses, in one place. Seen to work on torch 2.11, 2.13 and 2.15."""

from typing import Any

import torch
from torch.nn.modules import batchnorm, dropout
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "AnyBatchNorm",
    "AnyDropout",
    "DisableTorchFunction",
    "dump_memory_snapshot",
    "foreach_add_",
    "foreach_div_",
    "foreach_mul_",
    "foreach_norm",
    "record_memory_history",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "unscale_and_check_finite_",
]

# The base classes of all of torch's BatchNorm and Dropout modules.
AnyBatchNorm = batchnorm._BatchNorm
AnyDropout = dropout._DropoutNd

# A context in which neither modes nor subclasses of tensors change what torch's functions do.
DisableTorchFunction = torch._C.DisableTorchFunction

# Writes a pickle of the allocator's blocks and of its history, which pytorch.org/memory_viz opens.
dump_memory_snapshot = torch.cuda.memory._dump_snapshot


def record_memory_history(wanted: bool) -> None:
    """Begins or ends to record the CUDA allocator's history."""
    options: dict[str, Any] = {"max_entries": 200_000} if wanted else {"enabled": None}
    torch.cuda.memory._record_memory_history(**options)


# In-place operations on lists of tensors, with few kernel launches.
foreach_add_ = torch._foreach_add_
foreach_div_ = torch._foreach_div_
foreach_mul_ = torch._foreach_mul_
# The norm of each tensor of a list.
foreach_norm = torch._foreach_norm
# Multiplies gradients by a factor, and sets a flag to 1 when one of them is not finite; used by torch's GradScaler.
unscale_and_check_finite_ = torch._amp_foreach_non_finite_check_and_unscale_
