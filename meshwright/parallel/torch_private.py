"""Every private interface of torch that meshwright/parallel uses, in one file, with what it is used for.

All of them work on torch 2.11, 2.13 and 2.15. Where versions differ, a function of this file hides the difference.
When a new torch version breaks something, look at this file first; no other file of the folder uses private interfaces.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from traceback import walk_tb
from typing import Any, TypeVar
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import DisableTorchFunction as DisableTorchFunction
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd.graph import GradientEdge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
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

# ---- tensor subclasses (tensor/shard_view.py, tensor/dispatch.py, branches/pending.py, chunked_loss/scores.py)
#
# `DisableTorchFunctionSubclass` calls a torch function on a subclass without entering its `__torch_function__` again.
# `DisableTorchFunction` also disables modes that record torch functions.

# A context in which the user's dispatch modes are disabled. In it, functions are tried on fake tensors.
disable_dispatch_modes = _python_dispatch._disable_current_modes

# What a function raises on fake tensors if its result, or the shape of its result, depends on values.
VALUE_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)

# Creates a tensor that has a shape, dtype and device but no storage.
make_wrapper_subclass = Tensor._make_wrapper_subclass

# The functions that `torch.nn.functional` calls for linear layers, attention and cross-entropy. `__torch_function__` is
# given these objects, therefore the rules of tensor/products.py and tensor/vocabulary.py are registered under them.
linear_function = torch._C._nn.linear
attention_function = torch._C._nn.scaled_dot_product_attention
cross_entropy_function = torch._C._nn.cross_entropy_loss
nll_loss_function = torch._C._nn.nll_loss_nd

# Whether the backward pass that is running keeps the graph for another one (chunked_loss/cross_entropy.py).
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph

# Queues a function that is called at the end of the backward pass that is running (backward_wait.py).
queue_backward_callback = torch.autograd.Variable._execution_engine.queue_callback

# Checks a condition on the device without making the host wait for the device (tensor/vocabulary.py).
assert_async = torch._assert_async

# The base class of all of torch's BatchNorm modules (check.py).
AnyBatchNorm = batchnorm._BatchNorm
Function = TypeVar("Function", bound=Callable[..., Any])
_ON_PURPOSE = "meshwright runs it uncompiled on purpose"

# ---- gradients (clip.py): one kernel launch for many tensors

foreach_norm = torch._foreach_norm
foreach_mul_ = torch._foreach_mul_


# ---- attention with its log-sum (context/tiles.py)

_ATEN = torch.ops.aten


def cpu_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Returns the output of attention, and the logarithm of the sum of the exponentials of each query's scores."""
    output, log_sum = _ATEN._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    return output, log_sum


def cpu_attention_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sum: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value."""
    of_query, of_key, of_value = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, output, log_sum, 0.0, causal, scale=scale
    )
    return of_query, of_key, of_value


def flash_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """`cpu_attention` for CUDA tensors of half precision."""
    output, log_sum, *_ = _ATEN._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)
    return output, log_sum


def flash_attention_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sum: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`cpu_attention_gradients` for CUDA tensors of half precision. The state of the generator is only used with
    dropout."""
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    of_query, of_key, of_value = _ATEN._scaled_dot_product_flash_attention_backward(
        *(grad, query, key, value, output, log_sum),
        *(None, None, query.shape[-2], key.shape[-2], 0.0, causal, state, state),
        scale=scale,
    )
    return of_query, of_key, of_value


# ---- mesh (mesh.py)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Returns a mesh with a single axis, called `name`, of all ranks of the given mesh."""
    return mesh._flatten(name)


# ---- buckets of DDP (exchange_names.py)


def ddp_buckets(model: DistributedDataParallel) -> list[list[Tensor]]:
    """The parameters of each bucket, as DDP has assigned them when it was made."""
    parameters = [parameter for parameter in model._module_parameters if parameter.requires_grad]
    limits = [sys.maxsize]
    if model.find_unused_parameters and not model.static_graph:
        limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, model.bucket_bytes_cap]
    indices, _ = dist._compute_bucket_assignment_by_size(parameters, limits, [False] * len(parameters))
    return [[parameters[index] for index in bucket] for bucket in reversed(indices)]


# ---- FSDP2 (shard.py)


def fsdp_parameter_groups(unit: FSDPModule) -> list[Any]:
    """FSDP2's records (`FSDPParamGroup`) of the parameters that a module gathers together. Torch before 2.12 keeps one
    record or None for each module, later versions keep a list."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    group = getattr(state, "_fsdp_param_group", None)
    return [group] if group is not None else []


def forget_forward_order(group: Any) -> None:
    """Clears the order of forward passes, which FSDP2 records in order to prefetch all-gathers in the backward pass."""
    group.comm_ctx.post_forward_order.clear()
    group._post_forward_indices.clear()


def gradient_hooks(parameter: nn.Parameter) -> tuple[list[Any], list[Any]]:
    """The hooks that were registered with a parameter: those of its gradient, and those that run after the gradient was
    accumulated."""
    of_gradient: Any = parameter._backward_hooks or {}
    after_accumulation: Any = parameter._post_accumulate_grad_hooks or {}
    return list(of_gradient.values()), list(after_accumulation.values())


def forward_is_running(unit: FSDPModule) -> bool:
    """Whether the forward pass of the model that contains the unit has begun, and has not returned yet."""
    return unit._get_fsdp_state()._state_ctx.iter_forward_root is not None


def in_backward_node() -> bool:
    """Whether a node of autograd's graph is running. False in callbacks at the end of a backward pass."""
    return torch._C._current_autograd_node() is not None


def replace_pre_backward(unit: FSDPModule, replace: Callable[[Callable[[Tensor], Tensor]], Any]) -> None:
    """Replaces the function that FSDP2 calls when it has the gradient of one of the unit's outputs. `replace` gets that
    function and returns the new one."""
    state: Any = unit._get_fsdp_state()
    state._pre_backward = replace(state._pre_backward)


def count_waits(waiting: Any, counted: Callable[[], AbstractContextManager[None]]) -> None:
    """Runs what a group of FSDP2 calls to gather weights and to reduce gradients, or what DDP calls to send buffers,
    within a context that counts the time: on CPU ranks these calls wait for the other ranks. Does nothing on GPUs,
    where only the device waits."""
    if waiting.device.type != "cpu":
        return

    def within(weak: "WeakMethod[Callable[..., Any]]") -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            method = weak()
            assert method is not None
            if torch.compiler.is_compiling():
                return method(*args, **kwargs)
            with counted():
                return method(*args, **kwargs)

        return call

    of_group = ("unshard", "wait_for_unshard", "post_backward")
    for name in ("_sync_buffers",) if isinstance(waiting, DistributedDataParallel) else of_group:
        setattr(waiting, name, within(WeakMethod(getattr(waiting, name))))  # which does not keep it alive


def gather_until_backward(group: Any) -> None:
    """Gathers the weights of a group, and keeps them gathered from now on after every forward pass."""
    group.post_forward_mesh_info = None
    group.unshard()
    group.wait_for_unshard()


def keep_gathered(group: Any) -> None:
    """Leaves the weights of an FSDP2 unit gathered after forward passes, also if the unit is called within itself, when
    FSDP2 would free them whatever its option `reshard_after_forward` is. This ends with `free_gathered`."""
    group.reshard = lambda: None


def free_gathered(group: Any) -> None:
    """Ends `keep_gathered`, and frees the weights."""
    del group.reshard  # the method of the class is visible again
    group.reshard()


def was_gathered(parameter: Any) -> bool:
    """Whether FSDP2 has gathered this `FSDPParam` at least once."""
    return hasattr(parameter, "_unsharded_param")


# ---- initial weights (weights/initialize.py, weights/deferred.py)
#
# A `TorchDispatchMode` records the operators that build a model. `OpOverload` tells operators from Python functions.


def operator_schema(operator: Any) -> Any:
    """The schema of an operator: its name and arguments, and which of the arguments it writes to."""
    return operator._schema


def storage_id(tensor: Tensor) -> int:
    """A number that identifies the tensor's storage until the storage is freed. A view has the number of its base."""
    return tensor.untyped_storage()._cdata


def is_storage_shared(tensor: Tensor) -> bool:
    """Whether there is another tensor with the tensor's storage."""
    storage = tensor.untyped_storage()
    references: int = torch._C._storage_Use_Count(storage._cdata)
    return references > 2  # that of the tensor, and `storage`


# ---- shards of FSDP2 (weights/offload.py)


def with_local_tensor(tensor: DTensor, local: Tensor) -> DTensor:
    """A tensor that is divided as the given one, with this shard, which may be on another device than those of the mesh
    (weights/offload.py). `DTensor.from_local` would move it to the device of the mesh."""
    return DTensor(local, tensor._spec, requires_grad=False)


# ---- optimizers (weights/offload.py)


def step_without_hooks(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The function of the optimizer's class that makes a step, as it was before torch put the calls of hooks around
    it."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


# ---- replicas (replicate/replicate.py)


def broadcast_coalesced(group: dist.ProcessGroup, tensors: list[Tensor], bucket_bytes: int) -> None:
    """Overwrites the tensors by those of the group's first rank. As in DDP, small tensors share messages of up to
    `bucket_bytes`."""
    dist._broadcast_coalesced(group, tensors, bucket_bytes, 0)


def ignore_in_ddp(module: nn.Module, names: list[str]) -> None:
    """Makes a DDP that is later put around the module neither average nor broadcast the parameters and buffers of these
    names."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)


@cache
def silence_unused_parameters_warning() -> None:
    """Makes torch print its warning about `find_unused_parameters`, which it prints once in a process, into nothing.
    The warning advises to turn the flag off, and users cannot do that."""
    parameter, group = nn.Parameter(torch.zeros(1)), dist.group.WORLD
    assert group is not None
    stderr = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)  # torch prints it in C++
        reducer = dist.Reducer([parameter], [[0]], [1], group, [False], 1, True)  # as DDP makes it
        reducer.prepare_for_backward([parameter.sum()])
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def comm_hook_states(model: DistributedDataParallel) -> list[object]:
    """The state objects of the communication hooks that were registered with a DDP."""
    return [state for _, state in model._comm_hooks]


# ---- pipeline stages (pipeline/runner.py)
#
# `_TorchStage` overrides two private methods of `PipelineStage`: `_get_init_p2p_neighbors_ops` and
# `_validate_fwd_outputs`.


def backward_roots(stage: Any, microbatch: int) -> Sequence[Tensor | GradientEdge | None]:
    """What a stage's backward pass of a microbatch starts from: its outputs. For an output that is already sent, torch
    2.15 keeps the place in the graph only."""
    if hasattr(stage, "fwd_cache"):  # before torch 2.15
        return stage.fwd_cache[microbatch][0]
    return stage._forward_chunk_states[microbatch].stage_output_for_backward()


def is_view(tensor: Tensor) -> bool:
    """Whether autograd tracks the tensor as a view of another tensor. Such a view cannot be detached in place
    (pipeline/pipeline.py)."""
    return tensor._is_view()


# ---- compilation (compiled.py)


def compiler_errors() -> tuple[type[Exception], ...]:
    """The classes of the errors that `torch.compile` raises when it cannot compile. They are imported here, because
    importing the compiler takes a second."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    return TorchDynamoException, InductorError


def cpp_compilers() -> tuple[str, ...]:
    """The C++ compilers that `torch.compile` tries for code of CPUs: what the environment variable CXX names, or its
    default."""
    from torch._inductor import config

    names = config.cpp.cxx
    return tuple(name for name in ([names] if isinstance(names, str) else names) if name)


def is_backward_error_of_compiled_code(error: Exception) -> bool:
    """Whether torch's functions around compiled code have raised the error in a backward pass. They do with different
    texts if compiled code is differentiated a second time, by a gradient penalty for example, which it cannot be."""
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return False
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    runs_compiled_code = any("_aot_autograd" in frame.f_code.co_filename for frame in frames)
    return runs_compiled_code and any(frame.f_code.co_filename.endswith("autograd/graph.py") for frame in frames)


def was_compiling(error: BaseException) -> bool:
    """Whether the error was raised while the compiler was at work: also one of the device, such as too little memory.
    A backward pass is compiled when it runs for the first time, by a function of common.py for every backend."""
    frames = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
    return any(
        code.co_filename.endswith(("_dynamo/convert_frame.py", "_dynamo/backends/common.py"))
        or (code.co_filename.endswith("_inductor/compile_fx.py") and "compile" in code.co_name)
        for code in frames
    )


def uncompiled(function: Function) -> Function:
    """Returns the function, which runs as it is within compiled functions. `graph_breaks` does not count this."""
    disabled: Function = torch.compiler.disable(function, reason=_ON_PURPOSE)
    return disabled


def as_one_graph() -> AbstractContextManager[Any]:
    """Within this context, the compiler raises an error where it cannot trace a function as a whole, and compiles
    nothing of it."""
    return torch._dynamo.error_on_graph_break(True)


def graph_breaks() -> dict[str, int]:
    """Why the compiler could not trace functions as a whole since this process began, and how often, except where it is
    meant not to: in `uncompiled` functions and where the scores of a chunked loss are used. The first line of each
    reason is short. Empty if nothing was compiled."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    counts = dynamo.counters["graph_break"] if dynamo else {}
    return {
        reason: count for reason, count in counts.items() if _ON_PURPOSE not in reason and "LazyScores" not in reason
    }
