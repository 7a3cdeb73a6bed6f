"""Copies of a model and of a batch on fake tensors, which have shapes and dtypes but no memory. Tracing uses them."""

import copy
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.blocks.kept_results import kept_results
from meshwright.errors import InputError
from meshwright.model_io.batch import count_listed_samples, take_listed
from meshwright.model_io.output_trees import register_dataclasses
from meshwright.profile.experts import route_evenly
from meshwright.profile.grouped_products import traced_grouped_product
from meshwright.profile.torch_private import DataDependentOutputException, FakeTensorMode, tree_leaves, tree_map
from meshwright.user.code import user_position


def fake_model(model: nn.Module, mode: FakeTensorMode, skipped: Iterable[str] = (), batch: int = 1) -> nn.Module:
    """A copy of the model on fake CPU tensors, in which tied weights are still tied. The model itself is not changed.
    The modules named in `skipped` are not copied: `nn.Identity` takes their place. Mixtures of experts route evenly;
    the rows of an expert are a multiple of `batch`."""
    memo: dict[int, Any] = {id(model.get_submodule(name)): nn.Identity() for name in skipped}
    skipped_ids = {id(module) for name in skipped for module in model.get_submodule(name).modules()}
    results = kept_results(model)
    with mode:
        for module in model.modules():
            if id(module) in skipped_ids:
                continue
            for parameter in module.parameters(recurse=False):
                fake = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                memo.setdefault(id(parameter), nn.Parameter(fake, requires_grad=parameter.requires_grad))
            for buffer in module.buffers(recurse=False):
                memo.setdefault(id(buffer), torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu"))
        for key, result in results.items():
            memo.setdefault(key, torch.empty(result.shape, dtype=result.dtype, device="cpu"))
    copied = copy.deepcopy(model, memo)
    route_evenly(copied, batch)
    return copied


class FakeRules(TorchFunctionMode):
    """Within this mode, two kinds of calls work on fake tensors that fail on them otherwise.

    Grouped products, of which torch knows the shapes in bf16 only, run in any dtype. A random number without dimensions
    is 0.5, because models use one to decide whether to skip a layer (Whisper), and a fake tensor has no value. This is
    for costs only: without `fixes_random_scalars` such a model fails, because how it can be split or cut must not
    depend on a random number.

    `assumes_values` is for the costs of a model that reads values, where there are none to run it on: conditions on
    tensors are false, masks select everything, and a CTC loss is a sum over its inputs.
    """

    def __init__(self, fixes_random_scalars: bool = True, assumes_values: bool = False) -> None:
        super().__init__()
        self._fixes_random_scalars = fixes_random_scalars
        self._assumes_values = assumes_values

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        draws_scalar = name == "rand" and len(args) == 1 and args[0] in ([], ())
        if self._fixes_random_scalars and draws_scalar:  # by which a model decides, as stochastic depth does
            return torch.tensor(0.5)
        if name in ("grouped_mm", "_grouped_mm"):
            return traced_grouped_product(args[0], args[1], args[2] if len(args) > 2 else kwargs["offs"])
        if self._assumes_values and name in _ASSUMED:
            return _ASSUMED[name](func, *args, **kwargs)
        return func(*args, **kwargs)


def _assumed_condition(func: Any, value: Tensor) -> bool:
    try:
        return bool(func(value))
    except DataDependentOutputException:
        return False


def _assumed_selection(func: Any, input: Tensor, mask: Tensor) -> Tensor:
    return torch.broadcast_tensors(input, mask)[0].reshape(-1)


def _assumed_ctc_loss(func: Any, log_probs: Tensor, *_: Any, reduction: str = "mean", **__: Any) -> Tensor:
    losses = -log_probs.sum(dim=(0, -1))
    return losses if reduction == "none" else losses.mean()


_ASSUMED: dict[str, Callable[..., Any]] = {
    "__bool__": _assumed_condition,
    "masked_select": _assumed_selection,
    "ctc_loss": _assumed_ctc_loss,
}


def batch_size(sample: Any) -> int:
    """Number of samples in a batch: the length of its lists of samples, or else the most frequent size of dimension 0
    among its tensors."""
    listed = count_listed_samples(sample)
    if listed:
        return listed
    register_dataclasses(sample)
    sizes = [leaf.shape[0] for leaf in tree_leaves(sample) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not sizes:
        raise InputError("the sample batch holds no tensor with a batch dimension")
    return max(set(sizes), key=sizes.count)


def fake_batch(sample: Any, size: int, mode: FakeTensorMode) -> Any:
    """Returns the sample batch on fake tensors, with `size` samples. Tensors whose dimension 0 is not the batch keep
    their shape. Samples in lists keep their shapes, and are repeated in order."""
    sample_size = batch_size(sample)
    is_listed = count_listed_samples(sample) is not None
    if is_listed:
        sample = take_listed(sample, [index % sample_size for index in range(size)])

    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        has_samples = value.dim() > 0 and value.shape[0] == sample_size and not is_listed
        return torch.empty((size, *value.shape[1:]) if has_samples else value.shape, dtype=value.dtype, device="cpu")

    with mode:
        return tree_map(fake, sample)


def is_dense(tensors: Any) -> bool:
    """Whether no tensor in the tree is sparse. Fake copies of sparse tensors would be dense."""
    register_dataclasses(tensors)
    return all(leaf.layout == torch.strided for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))


@contextmanager
def one_sequence_per_row(sample: Any) -> Iterator[None]:
    """Within this context, the transformers library treats every row of tokens as one sequence.

    The library uses the position ids to detect rows into which several sequences were packed. Fake tensors have no
    values, so the library assumes packed sequences and masks attention that would have been causal, which is twice the
    work of the real step. If the sample batch contains position ids, it may be packed, and this context changes
    nothing.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    if not hasattr(masks, "find_packed_sequence_indices") or _has_positions(sample):
        yield
        return
    thread = threading.get_ident()
    with _PATCHING:
        if not _TRACING:
            masks.find_packed_sequence_indices = partial(_find_packed, masks.find_packed_sequence_indices)
        _TRACING.append(thread)
    try:
        yield
    finally:
        with _PATCHING:
            _TRACING.remove(thread)
            if not _TRACING:
                (masks.find_packed_sequence_indices,) = masks.find_packed_sequence_indices.args


# The function of the library is replaced for the whole process, and several threads may trace at the same time.
_PATCHING = threading.Lock()
_TRACING: list[int] = []  # the threads within `one_sequence_per_row`


def _find_packed(find_packed: Any, *args: Any, **kwargs: Any) -> Any:
    return None if threading.get_ident() in _TRACING else find_packed(*args, **kwargs)


def _has_positions(sample: Any) -> bool:
    if isinstance(sample, Mapping):
        return "position_ids" in sample or any(map(_has_positions, sample.values()))
    return isinstance(sample, list | tuple) and any(map(_has_positions, sample))


def tensor_bytes(batch: Any) -> int:
    """Bytes of all tensors in the batch."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def reads_values(error: BaseException) -> str:
    """Returns a phrase for users about a `DataDependentOutputException`: the model's code has read the value of a fake
    tensor, which has none."""
    position = user_position(error)
    return f"its code depends on the values of tensors{f' ({position[0]}, line {position[1]})' if position else ''}"
