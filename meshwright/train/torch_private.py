"""The private interfaces of torch that training uses, in one place. Seen to work on torch 2.11, 2.13 and 2.15."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import batchnorm, dropout
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "AnyBatchNorm",
    "AnyDropout",
    "DisableTorchFunction",
    "compiled_generators",
    "compiles_with_cuda_graphs",
    "dump_memory_snapshot",
    "end_allocating_to_pool",
    "foreach_add_",
    "foreach_div_",
    "foreach_mul_",
    "foreach_norm",
    "forget_gradient_accumulators",
    "forgetting_compiled_code",
    "is_refused_compilation",
    "record_memory_history",
    "release_pool",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "unscale_and_check_finite_",
    "without_compiler",
    "without_default_group",
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


@contextmanager
def compiles_with_cuda_graphs() -> Iterator[None]:
    """Within this context, `torch.compile` makes code with CUDA graphs of its own, as with `mode="reduce-overhead"`."""
    import torch._inductor.config as inductor

    with inductor.patch({"triton.cudagraphs": True}):
        yield


@contextmanager
def without_default_group() -> Iterator[None]:
    """Within this context, the process is in no process group: `torch.distributed.is_initialized` is False, and a
    collective over all ranks raises an error instead of waiting for them. Other groups are not used."""
    group = dist.group.WORLD
    if group is None:
        yield
        return
    dist.distributed_c10d._update_default_pg(None)
    try:
        yield
    finally:
        dist.distributed_c10d._update_default_pg(group)


@contextmanager
def forgetting_compiled_code() -> Iterator[None]:
    """Forgets at the end what was compiled within the context. If nothing was compiled before, the compiler is then as
    it was at the start of the process. Otherwise compiled code from before the context stays, because others may use
    it."""
    from torch._dynamo import convert_frame, eval_frame, reset

    def known() -> dict[int, Any]:
        references = (*convert_frame.input_codes.seen, *convert_frame.output_codes.seen)
        return {id(code): code for reference in references if (code := reference()) is not None}

    before = known()
    try:
        yield
    finally:
        if not before:
            reset()
        for number, code in known().items():
            if number not in before:
                eval_frame.reset_code(code)


# ---- CUDA graphs (step/graphs/capture.py, step/cuda_graphs.py)


def end_allocating_to_pool(device: torch.device, pool: Any) -> None:
    """Ends what the beginning of a capture has told the allocator: to serve it from this pool. Does nothing if the
    capture has not got that far."""
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index or 0, pool)


def release_pool(device: torch.device, pool: Any) -> None:
    """Gives a pool up, so that `empty_cache` returns its memory."""
    with suppress(RuntimeError):
        torch._C._cuda_releasePool(device.index or 0, pool)


def forget_gradient_accumulators(parameters: Iterable[nn.Parameter]) -> None:
    """Makes autograd add gradients on the stream on which the parameters are used next. It adds them on the stream of
    their first use, as long as any result of that use exists: a graph cannot be captured if a script has kept the
    output of an earlier forward pass.

    Autograd forgets the old node when the data of a parameter moves to another device; the data itself does not move.
    """
    for parameter in parameters:
        if parameter.requires_grad and parameter.is_cuda and type(parameter.data) is Tensor:
            data = parameter.data
            parameter.data = torch.empty(0, dtype=data.dtype)
            parameter.data = data


def without_compiler() -> AbstractContextManager[Any]:
    """Within this context, compiled functions run, and an error is raised where something would be compiled, for which
    `is_refused_compilation` is true."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("fail_on_recompile")


def is_refused_compilation(error: BaseException | None) -> bool:
    return error is not None and "fail_on_recompile" in str(error)


@contextmanager
def compiled_generators(generators: list[torch.Generator]) -> Iterator[None]:
    """Within this context, `generators` gets those that torch makes for compiled code that recomputes layers with
    random numbers. It makes them when such code runs for the first time."""
    from torch._functorch._aot_autograd import runtime_wrappers as module

    runtime_wrappers: Any = module
    original = runtime_wrappers.initialize_rng_states

    def initialize(number: int, index: int, first: list[Any], second: list[Any], **options: Any) -> None:
        original(number, index, first, second, **options)
        generators.extend([*first, *second])

    runtime_wrappers.initialize_rng_states = initialize
    try:
        yield
    finally:
        runtime_wrappers.initialize_rng_states = original


def module_hooks(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """The hooks that were registered with a module, by their numbers: those of its forward pass and those of its
    backward pass. A hook that is replaced in them is called in place of the old one."""
    every: Any = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return tuple(every)


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
