"""Averages gradients over the replicate axis where DDP cannot: next to a tensor or a pipeline axis, and in backward
passes that a user's own loop runs, which may belong to any number of forward passes.

Gradients are kept in buckets that are laid out before the first step, in reverse order of the parameters, which is
about the order in which the backward pass computes them. A bucket is sent as soon as the last microbatch of a step has
added to all its gradients. After the gradients it holds one number per parameter: whether this rank used it. A
parameter that a rank did not use counts as zeros; one that no rank used has no gradient.
"""

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.collectives.native import NativeReducer
from meshwright.collectives.reducer import Reducer, real_numbers
from meshwright.collectives.wait_clock import WAIT_CLOCK
from meshwright.parallel.replicate.bucket_names import describe_bucket


class GradientAverager:
    """Averages gradients over ranks, in buckets. Wrap each microbatch in `averaging`, or call `finish` after the last
    one."""

    def __init__(
        self, buckets: "list[_Bucket]", reducer: Reducer, *, overlap: bool, names: Mapping[int, str] | None = None
    ) -> None:
        """`names` are those of the parameters by their ids, for messages."""
        self._names = names or {}
        self._buckets = buckets
        self._reducer = reducer
        weakref.finalize(self, reducer.close)
        self._next_bucket = 0  # all ranks send buckets in this order, whichever is ready first
        self._is_averaging = self._is_last_microbatch = False
        if overlap:
            for bucket in buckets:
                for index, parameter in enumerate(bucket.parameters):
                    parameter.register_post_accumulate_grad_hook(partial(self._gradient_ready, bucket, index))

    @contextmanager
    def averaging(self, last: bool) -> Iterator[None]:
        """Wraps the backward pass of one microbatch, and maybe its forward pass. Gradients are sent in the last one of
        a step."""
        self._is_averaging, self._is_last_microbatch = True, last
        try:
            yield
        finally:
            self._is_averaging = self._is_last_microbatch = False
        if last:
            self.finish()

    def finish(self) -> None:
        """Leaves the mean gradients in the parameters. Every rank of the axis calls it after its last backward pass."""
        for bucket in self._buckets[self._next_bucket :]:
            bucket.collect()
            self._send(bucket)
        with WAIT_CLOCK.blocked(self._awaited):
            self._reducer.finish()
        for bucket in self._buckets:
            bucket.finish()
        self._next_bucket = 0

    def _awaited(self) -> str:
        """The exchange that this rank waits for, in words."""
        number = self._reducer.awaited
        in_bucket = {id(parameter) for parameter in self._buckets[number].parameters} if number is not None else set()
        return describe_bucket(number, [name for key, name in self._names.items() if key in in_bucket])

    def _send(self, bucket: "_Bucket") -> None:
        bucket.pack()
        self._reducer.start(bucket.send_buffer, self._next_bucket)
        self._next_bucket += 1

    def _gradient_ready(self, bucket: "_Bucket", index: int, parameter: Tensor) -> None:
        if not self._is_averaging:  # DDP averages in this backward pass, or it is that of another model's loss
            return
        bucket.take(index)
        if not self._is_last_microbatch:
            return
        assert not bucket.is_packed, "a gradient was added to after its bucket had been sent"
        bucket.missing.discard(index)
        while self._next_bucket < len(self._buckets) and not self._buckets[self._next_bucket].missing:
            self._send(self._buckets[self._next_bucket])


class _Bucket:
    """Parameters of one dtype and device, and the memory of their gradients. `missing` are the indices of parameters
    whose gradient of this step has not been computed."""

    def __init__(self, parameters: Sequence[nn.Parameter], reduce_dtype: torch.dtype | None) -> None:
        self.parameters = parameters
        self.is_packed = False
        self.missing = set(range(len(parameters)))
        sizes = [parameter.numel() for parameter in parameters]
        first = parameters[0]
        self._flat = torch.zeros(sum(sizes) + len(sizes), dtype=first.dtype, device=first.device)
        self._gradients, begin = [], 0
        for parameter, size in zip(parameters, sizes, strict=True):
            self._gradients.append(_view_like(self._flat[begin : begin + size], parameter))
            begin += size
        self._is_used = self._flat[begin:]
        self._numbers = real_numbers(self._flat)
        # The numbers of the bucket themselves, or a buffer for them in another type.
        self.send_buffer = self._numbers
        if reduce_dtype is not None:
            self.send_buffer = torch.empty_like(self._numbers, dtype=reduce_dtype)

    def take(self, index: int) -> None:
        """Moves a parameter's gradient into the bucket, where later microbatches add to it."""
        parameter, memory = self.parameters[index], self._gradients[index]
        gradient = parameter.grad
        assert gradient is not None
        if gradient.data_ptr() != memory.data_ptr() or gradient.is_sparse:
            memory.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            parameter.grad = memory

    def collect(self) -> None:
        """Moves all gradients that exist into the bucket."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.take(index)

    def pack(self) -> None:
        """Writes which parameters were used, and fills the send buffer."""
        unused = [index for index, parameter in enumerate(self.parameters) if parameter.grad is None]
        self.missing = set(unused)
        self.is_packed = True
        self._is_used.fill_(1)
        for index in unused:
            self._gradients[index].zero_()
            self._is_used[index] = 0
        if self.send_buffer is not self._numbers:
            self.send_buffer.copy_(self._numbers)

    def finish(self) -> None:
        """Gives the parameters their mean gradients, or None where no rank used the parameter."""
        assert self.is_packed
        self.is_packed = False
        if self.send_buffer is not self._numbers:
            self._numbers.copy_(self.send_buffer)
        # Reading the counts waits for the device. A rank that used all parameters knows that none of them is 0.
        users = self._is_used.tolist() if self.missing else None
        for index, parameter in enumerate(self.parameters):
            parameter.grad = self._gradients[index] if users is None or users[index] else None
        self.missing = set(range(len(self.parameters)))


def gradient_averager(
    module: nn.Module,
    reducer: Reducer,
    bucket_bytes: int,
    skip: Collection[str] = (),
    *,
    overlap: bool = True,
    reduce_dtype: torch.dtype | None = None,
) -> GradientAverager:
    """Returns a `GradientAverager` of the module's gradients, without those of the parameters named in `skip`.
    With `overlap`, buckets are sent during the last backward pass, otherwise in `finish` only. Gradients are sent as
    `reduce_dtype`, or where that is None in their own type."""
    parameters = [p for name, p in module.named_parameters() if p.requires_grad and name not in skip]
    buckets = [_Bucket(bucket, reduce_dtype) for bucket in assign_buckets(parameters, bucket_bytes)]
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return GradientAverager(buckets, reducer, overlap=overlap, names=names)


def average_once(parameters: Sequence[nn.Parameter], groups: Sequence[dist.ProcessGroup]) -> None:
    """Averages the gradients of a few parameters over the ranks of each group, one group after the other."""
    for group in groups:
        buckets = [_Bucket(bucket, None) for bucket in assign_buckets(parameters, 2**25)]
        GradientAverager(buckets, NativeReducer(group), overlap=False).finish()


def assign_buckets(parameters: Iterable[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """The parameters of each bucket, in reverse order. A bucket has one dtype and device, and is closed once it holds
    `bucket_bytes`."""
    buckets: list[list[nn.Parameter]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int]] = {}
    for parameter in reversed(list(parameters)):
        key = (parameter.dtype, parameter.device)
        if key not in open_buckets:
            open_buckets[key] = ([], 0)
            buckets.append(open_buckets[key][0])
        bucket, filled_bytes = open_buckets[key]
        bucket.append(parameter)
        filled_bytes += parameter.numel() * parameter.element_size()
        open_buckets[key] = (bucket, filled_bytes)
        if filled_bytes >= bucket_bytes:
            del open_buckets[key]
    return buckets


def _view_like(memory: Tensor, parameter: Tensor) -> Tensor:
    """A view of the memory with the parameter's shape, and with its strides where they leave no gaps: optimizers are
    faster where the strides of weight and gradient are equal."""
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return memory.as_strided(parameter.shape, parameter.stride())
    return memory.view(parameter.shape)
