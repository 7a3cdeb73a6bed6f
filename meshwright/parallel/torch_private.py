"""Every private interface of torch that meshwright/parallel uses, in one file, with what it is used for.

All of them were seen to work on torch 2.11 and 2.13. Where the two versions differ, the function here hides it. When a
new torch version breaks something, this is the first file to look at; nothing else in the folder reaches into torch.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _utils as dtensor_utils
from torch.nn.modules import batchnorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import register_pytree_node as register_pytree_node
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

# ---- tensor subclasses (tensor/shard_view.py, tensor/dispatch.py, branches/pending.py)
#
# `DisableTorchFunctionSubclass` calls a torch function on a subclass without entering its `__torch_function__` again.

# A context without the user's dispatch modes, in which a function is tried on fake tensors.
disable_dispatch_modes = _python_dispatch._disable_current_modes

# Creates a tensor that has a shape, dtype and device but no storage.
make_wrapper_subclass = Tensor._make_wrapper_subclass

# The functions that `torch.nn.functional` calls for linear layers, attention and cross-entropy: these objects arrive in
# `__torch_function__`, so the rules of tensor/products.py and tensor/vocabulary.py are registered under them.
linear_function = torch._C._nn.linear
attention_function = torch._C._nn.scaled_dot_product_attention
cross_entropy_function = torch._C._nn.cross_entropy_loss

# Checks a condition on the device without waiting for it (tensor/vocabulary.py).
assert_async = torch._assert_async

# The base class of all of torch's BatchNorm modules (check.py).
AnyBatchNorm = batchnorm._BatchNorm

# ---- gradients (clip.py): one kernel launch for many tensors

foreach_norm = torch._foreach_norm
foreach_mul_ = torch._foreach_mul_


# ---- mesh (mesh.py)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """One axis called `name` that holds all ranks of the mesh."""
    return mesh._flatten(name)


# ---- FSDP2 (shard.py)


def fsdp_parameter_groups(unit: FSDPModule) -> list[Any]:
    """FSDP2's record (`FSDPParamGroup`) of the parameters that a module gathers together. Torch before 2.12 has one or
    none for each module, later versions have a list."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    group = getattr(state, "_fsdp_param_group", None)
    return [group] if group is not None else []


def forget_forward_order(group: Any) -> None:
    """Clears the order of forward passes by which FSDP2 prefetches the next all-gather in the backward pass."""
    group.comm_ctx.post_forward_order.clear()
    group._post_forward_indices.clear()


def was_gathered(parameter: Any) -> bool:
    """Whether FSDP2 has gathered this `FSDPParam` at least once."""
    return hasattr(parameter, "_unsharded_param")


# ---- initial weights (weights/initialize.py, weights/deferred.py)
#
# `TorchDispatchMode` records the operators that build a model, `OpOverload` tells them from Python functions.


def operator_schema(operator: Any) -> Any:
    """The name and arguments of an operator, with which of them it writes to."""
    return operator._schema


def storage_id(tensor: Tensor) -> int:
    """A number that tells the memory of tensors apart as long as it is not freed; views have that of their base."""
    return tensor.untyped_storage()._cdata


# ---- shards of FSDP2 (weights/layout.py)


def local_shape_and_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of a rank's shard, and where it begins in the whole tensor."""
    shape, offset = dtensor_utils.compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(shape), tuple(offset)


# ---- replicas (replicate/replicate.py)


def broadcast_coalesced(group: dist.ProcessGroup, tensors: list[Tensor], bucket_bytes: int) -> None:
    """Overwrites tensors by those of the group's first rank, many small ones in one message, as DDP does."""
    dist._broadcast_coalesced(group, tensors, bucket_bytes, 0)


def ignore_in_ddp(module: nn.Module, names: list[str]) -> None:
    """DDP neither averages nor broadcasts the parameters and buffers of these names."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)


# ---- pipeline stages (pipeline/runner.py)
#
# `_TorchStage` overrides two private methods of `PipelineStage`: `_get_init_p2p_neighbors_ops` and
# `_validate_fwd_outputs`.


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows the tensor as a view of another one, which cannot be detached in place
    (pipeline/pipeline.py)."""
    return tensor._is_view()
